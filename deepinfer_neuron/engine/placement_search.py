"""What to change so that a layout fits: the shortest lists of changes."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from deepinfer_neuron.checkpoint.config import ModelConfig
from deepinfer_neuron.engine.layout import (
    MOST_CORES,
    Layout,
    default_ep,
    least_model_len,
)
from deepinfer_neuron.engine.placement import measure
from deepinfer_neuron.platform.simulator.cost import CoreSpec


@dataclass(frozen=True)
class Change:
    """One setting with its new value, as it is written in a plan."""

    setting: str
    value: str

    def __str__(self) -> str:
        return f"{self.setting}={self.value}"


@dataclass(frozen=True)
class _Knob:
    """One setting: layouts with ever stronger values of it."""

    name: str
    layouts: Callable[[Layout], Iterator[Layout]]


def shortest_changes(
    config: ModelConfig, layout: Layout, core: CoreSpec
) -> tuple[tuple[Change, ...], ...]:
    """All lists of fewest changes that make a layout fit, the mildest values in each.

    Returns:
        one tuple of changes per way; empty if nothing that is tried helps.
    """

    def fits(candidate: Layout) -> bool:
        return measure(config, candidate, core).missing <= 0

    knobs = _knobs(config)
    for size in range(1, len(knobs) + 1):
        found = []
        for chosen in itertools.combinations(knobs, size):
            changed = _mildest(layout, chosen, fits)
            if changed is not None:
                found.append(_difference(config, layout, changed))
        if found:
            return tuple(found)
    return ()


def _mildest(
    layout: Layout, knobs: Sequence[_Knob], fits: Callable[[Layout], bool]
) -> Layout | None:
    """The layout with the given settings changed no further than needed, if that can fit."""
    strongest = layout
    for knob in knobs:
        options = list(knob.layouts(strongest))
        if not options:
            return None
        strongest = options[-1]
    if not fits(strongest):
        return None
    # Weaken one setting after the other, the first one most.
    milder = layout
    for place, knob in enumerate(knobs):
        for option in knob.layouts(milder):
            rest = option
            for later in knobs[place + 1 :]:
                rest = list(later.layouts(rest))[-1]
            if fits(rest):
                milder = option
                break
    return milder


def _knobs(config: ModelConfig) -> tuple[_Knob, ...]:
    """Settings in the order in which ways are listed."""

    def lengths(layout: Layout) -> Iterator[Layout]:
        least, length = least_model_len(config), layout.max_model_len
        while length > least:
            length = max(least, length // 2)
            yield dataclasses.replace(layout, max_model_len=length)

    def sequences(layout: Layout) -> Iterator[Layout]:
        count = layout.max_num_seqs
        while count > 1:
            count //= 2
            yield dataclasses.replace(layout, max_num_seqs=count)

    def sharded(layout: Layout) -> Iterator[Layout]:
        if layout.dense == "replicated" and layout.cores > 1:
            yield dataclasses.replace(layout, dense="sharded")

    def cores(layout: Layout) -> Iterator[Layout]:
        count = layout.cores
        while count * 2 <= MOST_CORES:
            count *= 2
            ep = default_ep(config, count, layout.nextn)
            yield dataclasses.replace(layout, cores=count, ep=ep)

    def experts_spread(layout: Layout) -> Iterator[Layout]:
        most = default_ep(config, layout.cores, layout.nextn)
        for ep in range(layout.ep + 1, most + 1):
            if most % ep == 0:
                yield dataclasses.replace(layout, ep=ep)

    def no_drafts(layout: Layout) -> Iterator[Layout]:
        if layout.nextn:
            yield dataclasses.replace(layout, nextn=0)

    def host(layout: Layout) -> Iterator[Layout]:
        if not layout.host_embed:
            yield dataclasses.replace(layout, host_embed=True)

    return (
        _Knob("max_model_len", lengths),
        _Knob("max_num_seqs", sequences),
        _Knob("ep", experts_spread),
        _Knob("dense", sharded),
        _Knob("cores", cores),
        _Knob("nextn", no_drafts),
        _Knob("host_embed", host),
    )


def _difference(config: ModelConfig, before: Layout, after: Layout) -> tuple[Change, ...]:
    """Settings that differ; an ``ep`` that is left out follows ``cores``."""
    changes = []
    follows = before.cores != after.cores and before.ep == default_ep(
        config, before.cores, before.nextn
    )
    for field in dataclasses.fields(Layout):
        old, new = getattr(before, field.name), getattr(after, field.name)
        if old == new or (field.name == "ep" and follows):
            continue
        changes.append(Change(field.name, str(int(new)) if isinstance(new, bool) else str(new)))
    return tuple(changes)
