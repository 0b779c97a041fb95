"""Every region of the static network as StableHLO, run through XLA and compared with eager.

A decode step of two sequences with five drafts and a chunk of a prompt, as nano runs them: every
role of a layer, selections that leave entries out, and the filter of candidate blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from deepinfer_neuron.checkpoint.reader import Checkpoint
from deepinfer_neuron.model.matrix import WeightSource
from deepinfer_neuron.model.shapes import PassShape
from deepinfer_neuron.model.static.attention import attention_kind
from deepinfer_neuron.model.static.caches import WordCodecs
from deepinfer_neuron.model.static.mixture import LayerMixture
from deepinfer_neuron.ops.arithmetic import graph_arithmetic
from deepinfer_neuron.platform.lowering import Lowered, lower
from deepinfer_neuron.platform.regions import RegionKey, Regions, Signature
from deepinfer_neuron.runner.buckets import Ladder
from deepinfer_neuron.runner.pack import ChunkPlan
from deepinfer_neuron.runner.pack_static import StaticPlan
from deepinfer_neuron.runner.static_worker import StaticWorker
from tests.conftest import OpenCheckpoint
from tests.support.lowered import FirstCall, Recorder, check_region, check_run
from tests.support.static_runs import all_regions, static_worker

NEXTN = 5
PROMPT = PassShape(sequences=1, rows=64, blocks=2, outputs=1)
DECODE = PassShape(sequences=2, rows=8, blocks=2, outputs=1 + NEXTN)

# One step of bf16 where two orders of a sum round to different sides, in few of the values; fp32
# results behind such a value move by as much of its share.
STEP, SHARE = 2.0**-7, 2.0**-10
# One such step may move a stored value to the next code: half of the last bit of e2m1.
CODE, CODE_SHARE = 2.0**-2, 2.0**-7

needs_packages = pytest.mark.slow
Graphs = dict[tuple[RegionKey, Signature], list[FirstCall]]


@dataclass
class Recorded:
    """Graphs of both passes, with what they were called with; lowered ones are kept."""

    checkpoint: Checkpoint
    prompt: Graphs
    decode: Graphs
    lowered: dict[tuple[RegionKey, Signature], Lowered] = field(default_factory=dict)

    def text(self, graph: tuple[RegionKey, Signature], call: FirstCall) -> Lowered:
        """The lowered first call of a graph."""
        if graph not in self.lowered:
            self.lowered[graph] = lower(*call)
        return self.lowered[graph]


@pytest.fixture(scope="module")
def recorded(open_checkpoint: OpenCheckpoint) -> Recorded:
    checkpoint, recorder = open_checkpoint("nano"), Recorder()
    ladder = Ladder((2,), (8,), (64,), (2,), NEXTN)
    worker, rng = static_worker(checkpoint, ladder, recorder), np.random.default_rng(0)
    # The first sequence is behind the 64 entries from which on candidates are filtered.
    prompts = [rng.integers(5, 400, size=length).tolist() for length in (106, 70)]
    for slot, begin, end in ((1, 0, 64), (2, 0, 64), (1, 64, 100)):
        worker.queue([plan(worker, prompts[slot - 1], slot, begin, end)], PROMPT)
        # What the pass with a history is called with is what gets lowered.
        prompt = dict(recorder.graphs)
        recorder.graphs.clear()
    plans = [
        plan(worker, prompts[0], 1, 100, 106, NEXTN),
        plan(worker, prompts[1], 2, 64, 70, NEXTN),
    ]
    queued = worker.queue(plans, DECODE)
    outcome = worker.verify(queued, 2)
    worker.logits(queued)
    worker.propose(queued, outcome.tokens, outcome.accepted)
    worker.restore_window(1, 128, (2,))
    # What an engine with its embedding on the host, or without drafts, launches instead.
    worker.network.embedding.start_from(worker.network.embedding.table[:16].clone())
    worker.network.head.joined(outcome.tokens.clone(), outcome.accepted.clone())
    return Recorded(checkpoint, prompt, dict(recorder.graphs))


def plan(
    worker: StaticWorker, tokens: list[int], slot: int, begin: int, end: int, drafts: int = 0
) -> StaticPlan:
    """Tokens of a sequence with blocks of its own."""
    rows = worker.engram_rows([(worker.compress(tokens[:end]), begin)])
    table = [2 * slot + 1, 2 * slot + 2]
    return StaticPlan(ChunkPlan(tokens[begin:end], begin, slot, table, rows, 1 + drafts), drafts)


def of_region(graphs: Graphs, name: str) -> Iterator[tuple[RegionKey, Signature]]:
    """The graphs of a method, of every kind."""
    found = [graph for graph in graphs if f"{graph[0].cls}.{graph[0].method}" == name]
    assert found, f"{name} was not launched"
    yield from found


def near(step: float, share: float) -> Callable[[Tensor, Tensor], bool]:
    """Every value within ``step`` of itself or of the largest one, and the difference as a whole
    within ``share``; integers equal."""

    def compare(ours: Tensor, expected: Tensor) -> bool:
        if ours.dtype != expected.dtype or ours.shape != expected.shape:
            return False
        if not expected.is_floating_point():
            return torch.equal(ours, expected)
        a, b = ours.double(), expected.double()
        off = (a - b).abs()
        single = bool((off <= step * b.abs() + step / 4 * b.abs().amax()).all())
        return single and bool(off.norm() <= share * b.norm())

    return compare


results = near(STEP, SHARE)


def proposal(ours: Tensor, expected: Tensor) -> bool:
    """Tokens and drafts are equal; the last columns are bits of fp32 confidences."""
    same = torch.equal(ours[:, :-NEXTN], expected[:, :-NEXTN])
    bits = [t[:, -NEXTN:].contiguous().view(torch.float32) for t in (ours, expected)]
    return same and results(*bits)


def stored(checkpoint: Checkpoint) -> Callable[[Tensor, Tensor], bool]:
    """Compares caches by the values in their records, whose kind their width tells."""
    codecs = WordCodecs.of(checkpoint.config, graph_arithmetic())
    kinds = {codec.words: codec for codec in (codecs.window, codecs.entries, codecs.index)}
    assert len(kinds) == 3

    def compare(ours: Tensor, expected: Tensor) -> bool:
        if expected.dtype != torch.int32:
            return results(ours, expected)
        codec = kinds[expected.shape[-1]]
        return near(CODE, CODE_SHARE)(codec.unpack(ours), codec.unpack(expected))

    return compare


def comparison(name: str) -> Callable[[Tensor, Tensor], bool]:
    """For the outputs of a region."""
    return proposal if name == "StaticDrafts.propose" else results


def noise(args: tuple[Any, ...], seed: int) -> tuple[Any, ...]:
    """The arguments with other numbers in every floating-point tensor; what addresses rows stays
    as it was recorded."""
    generator = torch.Generator().manual_seed(seed)

    def other(value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        return torch.randn(value.shape, generator=generator).to(value.dtype)

    drawn: tuple[Any, ...] = pytree.tree_map(other, args)
    return drawn


def test_no_region_is_forgotten(recorded: Recorded) -> None:
    launched = {f"{key.cls}.{key.method}" for key, _ in recorded.decode}
    assert launched == set(all_regions())
    assert len(launched) == 16
    config = recorded.checkpoint.config
    kinds = {key.kind for key, _ in recorded.decode if key.cls == "StaticAttention"}
    assert kinds == {attention_kind(config, spec) for spec in config.layers}
    assert len(kinds) == 5


@needs_packages
@pytest.mark.parametrize("name", all_regions())
def test_a_decode_step_through_xla(name: str, recorded: Recorded) -> None:
    for graph in of_region(recorded.decode, name):
        call = recorded.decode[graph][0]
        written = stored(recorded.checkpoint)
        recorded.lowered[graph] = check_region(*call, comparison(name), written)
        drawn = noise(call[2], 1)
        if any(isinstance(x, Tensor) and x.is_floating_point() for x in pytree.tree_leaves(drawn)):
            check_run(recorded.lowered[graph], *call[:2], drawn, comparison(name), written)


@needs_packages
@pytest.mark.parametrize(
    "name",
    [
        "Preparation.prepare", "Embedding.start", "StaticAttention.attend",
        "StaticAttention.attend_and_select", "LayerMixture.mix", "StaticEngram.remember",
        "StaticDrafts.remember",
    ],
)  # fmt: skip
def test_a_prompt_through_xla(name: str, recorded: Recorded) -> None:
    for graph in of_region(recorded.prompt, name):
        check_region(*recorded.prompt[graph][0], comparison(name), stored(recorded.checkpoint))


@needs_packages
def test_layers_of_a_kind_share_their_text(recorded: Recorded) -> None:
    shared = {}
    for graph, calls in recorded.decode.items():
        texts = {recorded.text(graph, calls[0]).text, *(lower(*call).text for call in calls[1:])}
        assert len(texts) == 1, str(graph[0])
        shared[str(graph[0])] = len(calls)
    # Window only, reuse of three sources, sources of ratio 2, and the feed-forward halves.
    assert shared["StaticAttention.attend[window]"] == 2
    assert shared["StaticAttention.attend[reuse]"] == 3
    assert shared["StaticAttention.attend_and_select[ratio 2, keys, index keys, index]"] == 2
    assert shared["LayerMixture.mix"] == 9
    assert (shared["StaticEngram.remember"], shared["StaticDraftLayer.draft"]) == (2, 2)


@needs_packages
def test_ranks_share_their_text(recorded: Recorded) -> None:
    """The graph of one rank, run with the experts of another, gives that one's results."""
    (graph,) = of_region(recorded.decode, "LayerMixture.mix")
    function, _, args = recorded.decode[graph][3]
    ranks = [
        LayerMixture(
            recorded.checkpoint.config, 3,
            WeightSource(recorded.checkpoint, False, graph_arithmetic(), rank, 2), Regions(),
        )
        for rank in range(2)
    ]  # fmt: skip
    assert [int(rank.mixture.first_expert) for rank in ranks] == [0, 4]
    first, second = (lower(function, rank, args) for rank in ranks)
    assert first == second
    outputs = [rank.mix(*args)[0] for rank in ranks]
    assert not torch.equal(*outputs)
    check_run(first, function, ranks[1], args, results)
