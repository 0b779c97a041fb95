"""The engine's layers, each fed with what the reference's layer of the same number received.

Errors then cannot travel from part to part, and what goes wrong in one row's selection stays in
that row.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from deepinfer_neuron import reference
from deepinfer_neuron.model.attention import Published
from deepinfer_neuron.model.blocks import Layer
from deepinfer_neuron.ops.hyper import Mix
from deepinfer_neuron.reference.weights import Weights
from tests.support.engine_runs import Request, Sides, spans, whole_step


@dataclass(frozen=True)
class Given:
    """What the reference's layer computed, and what the engine's parts are fed with; fp32."""

    record: reference.LayerTrace
    entered: Tensor
    """Trunk at the attention site: behind the Engram update, where there is one."""
    attention_mix: reference.Mix
    ffn_mix: reference.Mix


def reference_layers(network: reference.Network, ids: Sequence[int]) -> tuple[list[Given], Tensor]:
    """Run the reference: the record of every layer, and the logits ``[n, V]``."""
    trace = reference.Trace()
    logits = network.logits(ids, trace)
    tables = network._engram_rows(torch.tensor(ids))
    given = []
    for spec, record in zip(network.config.layers, trace.layers, strict=True):
        entered = record.trunk_in
        if spec.engram is not None:
            weights = Weights(network.checkpoint, f"layers.{spec.index}.")
            entered, _ = network.engram(weights, entered, tables[spec.engram])
        mixes = trace.mixes[2 * spec.index : 2 * spec.index + 2]
        given.append(Given(record, entered, *mixes))
    return given, logits


@dataclass
class Fed:
    """What one engine layer made of the reference's values: one list item per chunk or row."""

    entered: list[Tensor] = field(default_factory=list)
    after_attention: list[Tensor] = field(default_factory=list)
    out: list[Tensor] = field(default_factory=list)
    attention_mix: list[Mix] = field(default_factory=list)
    ffn_mix: list[Mix] = field(default_factory=list)
    selected: list[Tensor] = field(default_factory=list)
    """Per row, the selected entries without padding."""
    kept: list[Tensor | None] = field(default_factory=list)
    """Per row, the candidate blocks without padding; ``None`` if all are kept."""


def feed(
    sides: Sides, ids: Sequence[int], given: Sequence[Given], cuts: Sequence[int] = ()
) -> list[Fed]:
    """Run every part of every layer on the reference's values, chunk by chunk, in fresh caches."""
    worker, request = sides.worker, Request.alone(ids)
    worker.allocate(len(request.table), 1)
    fed = [Fed() for _ in given]
    with torch.inference_mode():
        for start, stop in spans(len(ids), cuts):
            _feed_chunk(sides, request, given, fed, slice(start, stop))
    return fed


def _feed_chunk(
    sides: Sides, request: Request, given: Sequence[Given], fed: Sequence[Fed], rows: slice
) -> None:
    network, worker = sides.worker.network, sides.worker
    step = whole_step(worker, [request.plan(worker, rows.start, rows.stop)])
    turns, published = network.turns(step), Published()
    for layer, cache, source, result in zip(network.layers, worker.caches, given, fed, strict=True):
        assert isinstance(layer, Layer)
        start, entered, middle = (
            trunk[rows].to(network.arithmetic.dtype)
            for trunk in (
                source.record.trunk_in, source.entered, source.record.trunk_after_attention
            )
        )  # fmt: skip

        def attention(y: Tensor, layer: Layer = layer, cache=cache) -> Tensor:
            return layer.attention(y, step, turns, cache, published)

        if layer.engram is not None:
            start = layer.engram(start, step.engram_rows[layer.spec.engram])
        after, _ = layer.attention_site(entered, source.record.pre_in[rows], attention)
        out, _ = layer.ffn_site(middle, source.record.pre_after_attention[rows], layer.moe)
        result.entered.append(start)
        result.after_attention.append(after)
        result.out.append(out)
        result.attention_mix.append(layer.attention_site.mix(entered))
        result.ffn_mix.append(layer.ffn_site.mix(middle))
        if published.selected is not None:
            result.selected += [row[row >= 0] for row in published.selected]
        for blocks in published.candidates:
            every = [None] * len(step.token_ids)
            result.kept += every if blocks is None else [row[row >= 0] for row in blocks]


@dataclass(frozen=True)
class Comparison:
    """One layer of the engine against the reference."""

    error: Tensor
    """fp32 per row: how far the trunk behind a part is off, the largest of the three parts.

    It is relative to what the part adds to the trunk, or to a tenth of the trunk where that is
    more: the rounding of the trunk itself must not count.
    """
    equal: Tensor
    """bool per row: the trunk behind each part is the same in every bit."""
    mix: float
    """Largest absolute error of any coefficient of both sites."""
    same_selection: Tensor
    """bool per row: it attends to the same entries."""


def compare(fed: Fed, given: Given) -> Comparison:
    """Compare a fed layer with the reference's record of it."""
    record, rows = given.record, len(given.entered)
    error, equal = torch.zeros(rows), torch.ones(rows, dtype=torch.bool)
    before_attention = _carry(given.attention_mix, given.entered)
    before_ffn = _carry(given.ffn_mix, record.trunk_after_attention)
    for mine, theirs, carried in (
        (fed.entered, given.entered, record.trunk_in),
        (fed.after_attention, record.trunk_after_attention, before_attention),
        (fed.out, record.trunk_out, before_ffn),
    ):
        difference = torch.cat(mine).float() - theirs
        scale = torch.maximum(_length(theirs - carried), 0.1 * _length(theirs))
        error = torch.maximum(error, _length(difference) / scale)
        equal &= (difference == 0).flatten(1).all(1)
    same = torch.ones(rows, dtype=torch.bool)
    if record.shared.selected is not None:
        pairs = zip(fed.selected, record.shared.selected, strict=True)
        same = torch.tensor([torch.equal(mine, theirs) for mine, theirs in pairs])
    mix = max(
        _mix_error(fed.attention_mix, given.attention_mix), _mix_error(fed.ffn_mix, given.ffn_mix)
    )
    return Comparison(error, equal, mix, same)


def _mix_error(mine: Sequence[Mix], theirs: reference.Mix) -> float:
    pre, post, comb = (torch.cat(parts) for parts in zip(*mine, strict=True))
    pairs = ((pre, theirs.pre), (post, theirs.post), (comb, theirs.comb))
    return max(float((a - b).abs().max()) for a, b in pairs)


def _carry(mix: reference.Mix, trunk: Tensor) -> Tensor:
    return torch.einsum("nij,nid->njd", mix.comb, trunk)


def _length(x: Tensor) -> Tensor:
    return x.flatten(1).norm(dim=1)


def traded_gap(mine: Tensor, theirs: Tensor, scores: Tensor) -> float:
    """How much a selection gives away: 0 if both choose entries of the same scores.

    Args:
        mine: selected entries.
        theirs: other selected entries.
        scores: of all entries, -inf where invisible.

    Returns:
        the largest difference between the sorted scores of the entries that only one side chose,
        relative to the largest finite score; infinite if the sides chose different numbers.
    """
    only_mine, only_theirs = (
        scores[[entry for entry in a.tolist() if entry not in set(b.tolist())]].sort().values
        for a, b in ((mine, theirs), (theirs, mine))
    )
    if len(only_mine) != len(only_theirs):
        return math.inf
    if not len(only_mine):
        return 0.0
    largest = scores[scores > -math.inf].abs().amax()
    return float((only_mine - only_theirs).abs().amax() / largest)


def selection_changes(fed: Fed, given: Given) -> Iterator[float]:
    """What every row with another selection than the reference's gives away."""
    shared = given.record.shared
    if shared.selected is None or shared.scores is None:
        return
    for mine, theirs, scores in zip(fed.selected, shared.selected, shared.scores, strict=True):
        if not torch.equal(mine, theirs):
            yield traded_gap(mine, theirs, scores)
