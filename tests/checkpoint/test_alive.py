"""Synthetic checkpoints behave like a network: every part works, and none of them explodes.

A test that compares two computations is only worth something if a fault would change the result
(alive) and if the mere order of the sums would not (calm). Both are measured with the reference.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import pytest
import torch
from torch import Tensor

from deepinfer_neuron.checkpoint.config import LayerSpec, ModelConfig
from deepinfer_neuron.checkpoint.reader import Checkpoint
from deepinfer_neuron.checkpoint.tiny_weights import generic_name
from deepinfer_neuron.reference import LayerTrace, Network, PlainPrimitives, Trace

CASES = [("nano", 0), ("nano", 1), ("nano", 2), ("tiny", 0)]
SLOW_CASES = [pytest.param(*case, marks=pytest.mark.slow) for case in CASES[1:]]
LENGTH = 300
SHORT = 24


class Watching(PlainPrimitives):
    """Torch's arithmetic; writes down how attention shares its weight."""

    def __init__(self) -> None:
        self.sinks: list[Tensor] = []
        self.keys: list[Tensor] = []

    def exp(self, x: Tensor) -> Tensor:
        """The only vector that is exponentiated is the one of the sinks."""
        result = super().exp(x)
        if x.dim() == 1:
            self.sinks.append(result)
        return result

    def weighted_sum(self, weights: Tensor, values: Tensor) -> Tensor:
        """Called for the window keys and then for the compressed keys of each query."""
        self.keys.append(weights.sum(-1))
        return super().weighted_sum(weights, values)

    def shares(self, layers: int) -> Tensor:
        """Weight of sink, window and compressed keys: ``[layers, n, heads, 3]``, sum 1."""
        parts = (self.sinks, self.keys[0::2], self.keys[1::2])
        mass = torch.stack([torch.stack(part) for part in parts], -1)
        return (mass / mass.sum(-1, keepdim=True)).unflatten(0, (layers, -1))


class FineSums(PlainPrimitives):
    """Sums in fp64, rounded once: as far from torch's order as any other order may be."""

    def matmul(self, x: Tensor, w: Tensor) -> Tensor:
        """See :class:`Primitives` for all shapes."""
        return (x.double() @ w.double().transpose(-1, -2)).float()

    def matmul_wide(self, x: Tensor, w: Tensor) -> Tensor:
        """The same."""
        return self.matmul(x, w)

    def sum(self, x: Tensor) -> Tensor:
        """Sum of the last axis."""
        return x.double().sum(-1).float()

    def weighted_sum(self, weights: Tensor, values: Tensor) -> Tensor:
        """Weighted sum of the keys."""
        return (weights.double() @ values.double()).float()


class Damaged(Checkpoint):
    """A checkpoint in which chosen matrices read as zero, at least some of their rows."""

    zero_from: Callable[[str], int | None] = staticmethod(lambda name: None)
    """First row to be zero; ``None`` leaves the tensor of this name alone."""

    def tensor(self, name: str) -> Tensor:
        """Zero codes stand for zero in every format."""
        values = super().tensor(name)
        first = self.zero_from(name)
        if first is not None:
            values = values.clone()
            values[first:] = 0
        return values

    def rows(self, name: str, index: Tensor) -> Tensor:
        """Rows of a table are zeroed together."""
        values = super().rows(name, index)
        return values if self.zero_from(name) is None else torch.zeros_like(values)


@dataclass(frozen=True)
class Run:
    """One prompt through the reference."""

    checkpoint: Checkpoint
    ids: list[int]
    logits: Tensor
    trace: Trace
    shares: Tensor

    @property
    def config(self) -> ModelConfig:
        return self.checkpoint.config

    def layers(self) -> list[tuple[LayerSpec, LayerTrace]]:
        return list(zip(self.config.layers, self.trace.layers, strict=True))


def random_ids(config: ModelConfig, count: int) -> list[int]:
    draw = random.Random(count)
    return [draw.randrange(config.vocab_size) for _ in range(count)]


def difference(a: Tensor, b: Tensor) -> Tensor:
    """Relative distance of each row."""
    return (a - b).norm(dim=1) / b.norm(dim=1)


@pytest.fixture(scope="module", params=CASES, ids=[f"{preset}-{seed}" for preset, seed in CASES])
def directory(request: pytest.FixtureRequest, checkpoint_dir: Callable[..., Path]) -> Path:
    preset, seed = request.param
    return checkpoint_dir(preset, seed)


@pytest.fixture(scope="module")
def run(directory: Path) -> Iterator[Run]:
    with Checkpoint.open(directory) as checkpoint:
        ids = random_ids(checkpoint.config, LENGTH)
        trace, watching = Trace(), Watching()
        logits = Network(checkpoint, ops=watching).logits(ids, trace)
        shares = watching.shares(checkpoint.config.num_hidden_layers)
        yield Run(checkpoint, ids, logits, trace, shares)


@dataclass(frozen=True)
class Selection:
    """What one index source keeps, for the queries that see more entries than they may keep."""

    kept: Tensor
    """bool ``[queries, entries]``"""
    visible: Tensor
    """int64 ``[queries]``"""


def selection(config: ModelConfig, layer: LayerSpec, trace: LayerTrace) -> Selection:
    assert trace.shared.selected is not None
    assert trace.shared.scores is not None
    visible = (torch.arange(LENGTH) + 1) // layer.ratio
    kept = torch.zeros(trace.shared.scores.shape, dtype=torch.bool)
    for row, entries in enumerate(trace.shared.selected):
        kept[row, entries] = True
    full = visible > config.index_topk
    return Selection(kept[full], visible[full])


def index_sources(run: Run) -> list[tuple[LayerSpec, LayerTrace]]:
    return [(layer, trace) for layer, trace in run.layers() if layer.owns_index]


class TestAlive:
    def test_logits_prefer_some_tokens(self, run: Run) -> None:
        """Different ones at different positions, clearly but not with certainty."""
        deviation = run.logits.std(1)
        assert 2.0 < deviation.min() < deviation.max() < 4.0
        assert len(run.logits.argmax(1).unique()) > 0.55 * LENGTH
        best = run.logits.topk(2, dim=1).values
        assert (best[:, 0] - best[:, 1]).median() > 0.4
        assert 0.1 < run.logits.softmax(1).amax(1).median() < 0.5

    def test_every_expert_works(self, run: Run) -> None:
        experts = run.config.n_routed_experts
        for _, trace in run.layers():
            load = torch.bincount(trace.route.flatten(), minlength=experts) / trace.route.numel()
            assert load.min() > 0.1 / experts
            assert load.max() < 2.5 / experts

    def test_index_selection_drops_entries(self, run: Run) -> None:
        for layer, trace in index_sources(run):
            chosen = selection(run.config, layer, trace)
            assert (chosen.kept.sum(1) == run.config.index_topk).all()
            assert (chosen.kept.sum(1) / chosen.visible).mean() < 0.7

    def test_index_selection_depends_on_the_query(self, run: Run) -> None:
        """It hits the latest, the first and the neighbour's entries about as often as chance."""
        limit = run.config.index_topk
        for layer, trace in index_sources(run):
            chosen = selection(run.config, layer, trace)
            entry = torch.arange(chosen.kept.shape[1])
            chance = (limit / chosen.visible).mean()
            latest = entry >= (chosen.visible - limit)[:, None]
            overlaps = (
                (chosen.kept & latest).sum(1),
                chosen.kept[:, :limit].sum(1),
                (chosen.kept[1:] & chosen.kept[:-1]).sum(1),
            )
            for overlap in overlaps:
                assert overlap.float().mean() / limit < chance + 0.1

    def test_index_sources_disagree(self, run: Run) -> None:
        sources = index_sources(run)
        for (first, a), (second, b) in zip(sources[0::2], sources[1::2], strict=True):
            assert first.ratio == second.ratio
            kept_a, kept_b = (
                selection(run.config, layer, trace).kept
                for layer, trace in ((first, a), (second, b))
            )
            assert (kept_a & kept_b).sum() < 0.75 * kept_a.sum()

    def test_index_scores_are_no_ties(self, run: Run) -> None:
        for _, trace in index_sources(run):
            assert trace.shared.scores is not None
            last = trace.shared.scores[-1]
            finite = last[last.isfinite()]
            assert len(finite.unique()) > 0.6 * len(finite)

    def test_candidate_blocks_drop_entries(self, run: Run) -> None:
        """Once there are more blocks than may be kept, and not only the latest are kept."""
        config = run.config
        room = config.candidate_topk_blocks * config.candidate_block_size
        (trace,) = [trace for layer, trace in run.layers() if layer.is_candidate_source]
        assert trace.shared.candidates is not None
        kept = trace.shared.candidates[-1]
        if room >= LENGTH:
            assert kept.all()
            return
        assert kept.sum() <= room < LENGTH / 2
        assert kept[: LENGTH // 2].any()
        assert (kept != trace.shared.candidates[-2]).any()

    def test_engram_gates_are_half_open(self, run: Run) -> None:
        gates = [trace.engram_gate for _, trace in run.layers() if trace.engram_gate is not None]
        assert len(gates) == 2
        for gate in gates:
            assert ((gate > 0.1) & (gate < 0.9)).float().mean() > 0.95
            assert gate.std(0).min() > 0.1
            assert gate.std(1).mean() > 0.1

    def test_hyper_connections_mix(self, run: Run) -> None:
        """Streams are read, written and mixed unevenly, differently for every token."""
        strongest = []
        for mix in run.trace.mixes:
            read = mix.pre / mix.pre.sum(1, keepdim=True)
            strongest.append(mix.comb.amax((1, 2)).median())
            assert read.amax(1).median() < 0.8
            assert strongest[-1] < 0.96
            assert mix.post.std(1).mean() > 0.1
            assert (mix.comb - mix.comb.transpose(1, 2)).abs().mean() > 0.005
            for part, least in ((mix.pre, 0.015), (mix.post, 0.04), (mix.comb, 0.004)):
                assert part.std(0).mean() > least
        assert torch.stack(strongest).median() < 0.9

    def test_attention_is_shared(self, run: Run) -> None:
        """Between the sink, the window and the compressed keys, unevenly over the queries."""
        for (layer, _), share in zip(run.layers(), run.shares, strict=True):
            sink, near, far = share.flatten(0, 1).unbind(1)
            assert 0.01 < sink.mean() < 0.6
            assert sink.std() > 0.02
            assert near.mean() > 0.05
            if layer.ratio > 0:
                assert 0.2 < far.mean() < 0.9

    @pytest.mark.parametrize(("preset", "seed"), [CASES[0], *SLOW_CASES])
    def test_every_layer_matters(
        self, checkpoint_dir: Callable[..., Path], preset: str, seed: int
    ) -> None:
        """Without one layer's attention, experts or memory, the logits visibly change."""
        with Damaged.open(checkpoint_dir(preset, seed)) as damaged:
            config = damaged.config
            network, ids = Network(damaged), random_ids(config, SHORT)
            whole = network.logits(ids)

            def change(zero_from: Callable[[str], int | None]) -> float:
                damaged.zero_from = zero_from
                return difference(network.logits(ids), whole).median().item()

            attention = [change(zero_attention(layer.index)) for layer in config.layers]
            experts = [change(zero_experts(layer.index)) for layer in config.layers]
            keys = config.hc_mult * config.hidden_size
            assert config.engram is not None
            memory = [change(zero_memory(layer, keys)) for layer in config.engram.layer_ids]
        assert min(attention) > 0.0025
        assert min(experts) > 0.004
        assert fmean(attention[1:]) > 0.004
        assert fmean(experts[1:]) > 0.006
        assert min(attention[0], experts[0]) > 0.2
        assert min(memory) > 0.1

    def test_every_kind_of_tensor_matters(self, checkpoint_dir: Callable[..., Path]) -> None:
        """Only the router's bias for images has no effect on text."""
        with Damaged.open(checkpoint_dir("nano", 0)) as damaged:
            network, ids = Network(damaged), random_ids(damaged.config, 40)
            whole = network.logits(ids)
            kinds = {
                generic_name(name)
                for name in damaged.specs
                if name.startswith("layers.") and not name.endswith("scale")
            }
            change = {}
            for kind in sorted(kinds):
                damaged.zero_from = zero_kind(kind)
                change[kind] = difference(network.logits(ids), whole).median().item()
        assert len(kinds) > 30
        assert change.pop("ffn.gate.bias_vl") == 0.0
        assert min(change.values()) > 0.003


def zero_attention(layer: int) -> Callable[[str], int | None]:
    """Zeroes the output matrix of one layer's attention."""
    return lambda name: 0 if name == f"layers.{layer}.attn.wo_b.weight" else None


def zero_experts(layer: int) -> Callable[[str], int | None]:
    """Zeroes the output matrices of all experts of one layer."""
    prefix, suffix = f"layers.{layer}.ffn.", "w2.weight"
    return lambda name: 0 if name.startswith(prefix) and name.endswith(suffix) else None


def zero_memory(layer: int, first: int) -> Callable[[str], int | None]:
    """Zeroes the value rows of one layer's Engram projection, which start at ``first``."""
    return lambda name: first if name == f"layers.{layer}.engram.wkv.weight" else None


def zero_kind(kind: str) -> Callable[[str], int | None]:
    """Zeroes one kind of tensor in all layers."""
    return lambda name: 0 if name.startswith("layers.") and generic_name(name) == kind else None


class TestCalm:
    def test_the_order_of_sums_hardly_matters(self, run: Run) -> None:
        """Rows of a long prompt are those of a short one, since no position looks ahead."""
        fine = Network(run.checkpoint, ops=FineSums()).logits(run.ids)
        for rows in (16, 150, LENGTH):
            assert difference(run.logits, fine)[:rows].median() < 0.005
        same = run.logits.argmax(1) == fine.argmax(1)
        assert same.float().mean() > 0.98

    @pytest.mark.slow
    @pytest.mark.parametrize("seed", [0, 1, 2])
    def test_nor_over_long_prompts(self, checkpoint_dir: Callable[..., Path], seed: int) -> None:
        plain, fine = both_orders(checkpoint_dir("tiny", seed), 600)
        assert difference(plain, fine).median() < 0.005
        assert (plain.argmax(1) == fine.argmax(1)).float().mean() > 0.98

    def test_wild_weights_amplify(self, checkpoint_dir: Callable[..., Path]) -> None:
        plain, fine = both_orders(checkpoint_dir("nano", 0, wild=True), LENGTH)
        assert difference(plain, fine).median() > 0.02


def both_orders(directory: Path, length: int) -> tuple[Tensor, Tensor]:
    """Logits of a random prompt with torch's sums and with fp64 sums."""
    with Checkpoint.open(directory) as checkpoint:
        ids = random_ids(checkpoint.config, length)
        plain = Network(checkpoint).logits(ids)
        return plain, Network(checkpoint, ops=FineSums()).logits(ids)
