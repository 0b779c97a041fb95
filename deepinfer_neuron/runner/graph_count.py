"""How many graphs a warm-up compiles, from the configuration alone.

A region is compiled once per shape of its arguments. What a shape depends on is written here
region by region; nothing is built, so that a plan for the released model needs no weights.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from typing import Any

from deepinfer_neuron.cache.pools import BLOCK_TOKENS
from deepinfer_neuron.checkpoint.config import ModelConfig
from deepinfer_neuron.model.shapes import PassShape
from deepinfer_neuron.model.static.attention import StaticAttention, attention_kind
from deepinfer_neuron.model.static.drafts import StaticDraftLayer, StaticDrafts, draft_rows
from deepinfer_neuron.model.static.heads import StaticHead
from deepinfer_neuron.model.static.mixture import LayerMixture, StaticEngram
from deepinfer_neuron.model.static.preparation import Embedding, Preparation
from deepinfer_neuron.model.static.restoring import WindowRestorer
from deepinfer_neuron.runner.buckets import Ladder

Launch = tuple[str, Hashable]
"""A region's name with its kind, and what the shapes of its arguments follow from."""


def planned_graphs(config: ModelConfig, ladder: Ladder, nextn: int) -> dict[str, int]:
    """Graphs of every region after a complete warm-up.

    Args:
        config: the model.
        ladder: shapes of the passes.
        nextn: drafts per sequence, 0 without drafts.

    Returns:
        numbers by name, such as ``StaticAttention.attend[reuse]``, in the order of a pass.
    """
    found: dict[str, set[Hashable]] = {}
    for shape in ladder.passes():
        for name, size in _pass_launches(config, shape, nextn):
            found.setdefault(name, set()).add(size)
    # Window caches of all layers, draft layers included, are of one size.
    found[_name(WindowRestorer.restore)] = {()}
    return {name: len(sizes) for name, sizes in found.items()}


def decode_launches(config: ModelConfig, shape: PassShape, nextn: int) -> tuple[str, ...]:
    """Names of the regions that a greedy decode step launches, in order.

    Args:
        config: the model.
        shape: of the pass.
        nextn: drafts per sequence, 0 without drafts.
    """
    end = _draft_launches(config, shape, nextn) if nextn else [(_name(StaticHead.joined), ())]
    launches = [
        *_backbone_launches(config, shape, nextn), (_name(StaticHead.verify), ()), *end
    ]  # fmt: skip
    return tuple(name for name, _ in launches)


def _pass_launches(config: ModelConfig, shape: PassShape, nextn: int) -> Iterator[Launch]:
    """Every way in which a pass can end; see :func:`deepinfer_neuron.runner.warm_up.warm_up`."""
    rows, wanted = shape.total_rows, (shape.sequences, shape.outputs)
    yield from _backbone_launches(config, shape, nextn)
    yield _name(StaticHead.verify), (rows, *wanted)
    yield _name(StaticHead.logits), (rows, shape.sequences * shape.outputs)
    if nextn:
        yield _name(StaticHead.chosen), wanted
        yield from _draft_launches(config, shape, nextn)
    else:
        yield _name(StaticHead.joined), wanted


def _backbone_launches(config: ModelConfig, shape: PassShape, nextn: int) -> Iterator[Launch]:
    rows = shape.total_rows
    yield _name(Preparation.prepare), shape
    yield _name(Embedding.start), rows
    selection: Hashable = None
    for spec in config.layers:
        kind = attention_kind(config, spec)
        if spec.engram is not None:
            yield _name(StaticEngram.remember), rows
        if spec.owns_index:
            yield _name(StaticAttention.attend_and_select, kind), shape
            selection = _selection(config, shape, spec.ratio)
        else:
            seen = selection if spec.ratio else None
            yield _name(StaticAttention.attend, kind), (rows, shape.sequences, seen)
        yield _name(LayerMixture.mix), rows
    if nextn:
        yield _name(StaticDrafts.remember), rows


def _draft_launches(config: ModelConfig, shape: PassShape, nextn: int) -> Iterator[Launch]:
    assert config.draft is not None
    wanted = (shape.sequences, shape.outputs)
    yield _name(StaticDrafts.begin), wanted
    yield _name(Embedding.start), shape.sequences * draft_rows(nextn)
    for _ in range(config.draft.num_layers):
        yield _name(StaticDraftLayer.draft), shape.sequences
    yield _name(StaticDrafts.propose), wanted


def _selection(config: ModelConfig, shape: PassShape, ratio: int) -> tuple[int, int]:
    """Keys that an index source gathers, and how many of them a row may take."""
    entries = shape.blocks * (BLOCK_TOKENS // ratio)
    taken = min(entries, config.index_topk)
    return min(shape.sequences * entries, shape.total_rows * taken), taken


def _name(method: Callable[..., Any], kind: str = "") -> str:
    """As a :class:`deepinfer_neuron.platform.regions.RegionKey` spells it."""
    return f"{method.__qualname__}[{kind}]" if kind else method.__qualname__
