"""The engine's draft blocks against the reference's, which recomputes everything densely.

The engine keeps main keys in rings while it runs prompts in chunks and steps of several rows, some
of which are rejected; the reference runs the whole prefix at once. Without rounding points both
agree up to the order of sums; with every rounding point and the same order of sums, bit for bit.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from deepinfer_neuron.checkpoint.reader import Checkpoint
from deepinfer_neuron.model import drafts as engine_drafts
from deepinfer_neuron.ops.arithmetic import (
    Arithmetic,
    FixedOrder,
    FreeOrder,
    fixed_arithmetic,
    free_arithmetic,
)
from deepinfer_neuron.reference import DraftBlock, Drafts, Network, Rounding
from deepinfer_neuron.runner.pack import ChunkPlan
from deepinfer_neuron.runner.pack_drafts import DraftPlan
from deepinfer_neuron.runner.worker import Worker, blocks_for
from tests.conftest import OpenCheckpoint

TOLERANCE = 1e-5
LENGTHS = [1, 2, 3, 31, 40, 127, 128, 129, 200]


def worker_of(checkpoint: Checkpoint, arithmetic: Arithmetic, nextn: int) -> Worker:
    worker = Worker(checkpoint, arithmetic, expanded=True, max_length=512, nextn=nextn)
    worker.allocate(8, 3)
    return worker


def unrounded(checkpoint: Checkpoint, nextn: int) -> tuple[Drafts, Worker]:
    network = Network(checkpoint, Rounding(enabled=False))
    arithmetic = Arithmetic(FreeOrder(), rounding=False)
    return Drafts(network), worker_of(checkpoint, arithmetic, nextn)


def random_ids(checkpoint: Checkpoint, count: int, seed: int = 0) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(checkpoint.config.vocab_size) for _ in range(count)]


def feed(worker: Worker, ids: Sequence[int], start: int, stop: int, slot: int = 2) -> None:
    """Run positions ``[start, stop)``."""
    if start == stop:
        return
    rows = worker.engram_rows([(worker.compress(ids[:stop]), start)])
    table = list(range(1, 1 + blocks_for(stop)))
    worker.hidden([ChunkPlan(ids[start:stop], start, slot, table, rows, 1)])


@torch.inference_mode()
def draft(worker: Worker, ids: Sequence[int], slot: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, tokens and confidences behind a prefix whose last token was not fed."""
    hidden = worker.draft_hidden([DraftPlan(ids[-1], len(ids) - 1, slot)])
    scale = torch.ones(worker.nextn)
    head = worker.network.head
    tokens, trust = worker.draft_heads.greedy(hidden, torch.tensor([ids[-1]]), scale, head)
    return hidden, tokens[0], trust[0]


def error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def agree(found: tuple[Tensor, Tensor, Tensor], expected: DraftBlock) -> None:
    hidden, tokens, trust = found
    assert error(hidden, expected.hidden) < TOLERANCE
    assert tokens.tolist() == expected.tokens.tolist()
    assert float((trust - expected.confidence).abs().max()) < TOLERANCE


@pytest.mark.parametrize("length", LENGTHS)
def test_meaning_without_roundings(open_checkpoint: OpenCheckpoint, length: int) -> None:
    checkpoint = open_checkpoint("nano", length % 3, False)
    reference, worker = unrounded(checkpoint, 1 + length % 7)
    ids = random_ids(checkpoint, length)
    feed(worker, ids, 0, length - 1)
    agree(draft(worker, ids), reference.block(ids, worker.nextn))


@pytest.mark.parametrize("nextn", [1, 3, 5, 7])
def test_meaning_after_rejections(open_checkpoint: OpenCheckpoint, nextn: int) -> None:
    """Steps of several rows, part of them rejected and written again, over ring wraps."""
    checkpoint = open_checkpoint("nano", 1, False)
    reference, worker = unrounded(checkpoint, nextn)
    ids, rng, done = random_ids(checkpoint, 190), random.Random(nextn), 100
    feed(worker, ids, 0, done)
    while done + nextn + 1 < len(ids):
        wrong = random_ids(checkpoint, nextn, seed=done)
        accepted = rng.randint(0, nextn)
        rows = [*ids[: done + 1 + accepted], *wrong[accepted:]]
        feed(worker, rows, done, len(rows))
        done += accepted + 1
        draft(worker, ids[: done + 1])
    agree(draft(worker, ids[: done + 1]), reference.block(ids[: done + 1], nextn))


def test_meaning_with_the_tiny_preset(open_checkpoint: OpenCheckpoint) -> None:
    checkpoint = open_checkpoint("tiny", 0, False)
    reference, worker = unrounded(checkpoint, 5)
    ids = random_ids(checkpoint, 60)
    feed(worker, ids, 0, 40)
    feed(worker, ids, 40, 59)
    agree(draft(worker, ids), reference.block(ids, 5))


@pytest.mark.parametrize("length", [1, 30, 129, 170])
def test_bitwise_with_the_same_order_of_sums(open_checkpoint: OpenCheckpoint, length: int) -> None:
    """Every rounding point in its place; the confidence sums its products in another grouping."""
    checkpoint = open_checkpoint("nano", 2, True)
    reference = Drafts(Network(checkpoint, ops=FixedOrder()))
    worker = worker_of(checkpoint, fixed_arithmetic(), 5)
    ids = random_ids(checkpoint, length)
    feed(worker, ids, 0, min(length - 1, 50))
    feed(worker, ids, min(length - 1, 50), length - 1)
    hidden, tokens, trust = draft(worker, ids)
    expected = reference.block(ids, 5)
    assert torch.equal(hidden.float(), expected.hidden)
    assert torch.equal(tokens, expected.tokens)
    assert float((trust - expected.confidence).abs().max()) < 1e-5


def test_free_order_stays_close(open_checkpoint: OpenCheckpoint) -> None:
    checkpoint = open_checkpoint("nano", 0, False)
    reference, worker = Drafts(Network(checkpoint)), worker_of(checkpoint, free_arithmetic(), 5)
    ids = random_ids(checkpoint, 150)
    feed(worker, ids, 0, 149)
    hidden, _, trust = draft(worker, ids)
    expected = reference.block(ids, 5)
    assert error(hidden.float(), expected.hidden) < 0.05
    assert float((trust - expected.confidence).abs().max()) < 0.05


def test_sequences_do_not_see_each_other(open_checkpoint: OpenCheckpoint) -> None:
    checkpoint = open_checkpoint("nano", 0, False)
    worker = worker_of(checkpoint, fixed_arithmetic(), 3)
    ids, other = random_ids(checkpoint, 70), random_ids(checkpoint, 9, seed=5)
    feed(worker, ids, 0, 69)
    alone = worker.draft_hidden([DraftPlan(ids[-1], 69, 2)])
    feed(worker, other, 0, 8, slot=1)
    together = worker.draft_hidden([DraftPlan(other[-1], 8, 1), DraftPlan(ids[-1], 69, 2)])
    assert torch.equal(together[3:], alone)


class TestFaultsAreSeen:
    """Each planted fault breaks the agreement."""

    def broken(self, checkpoint: Checkpoint, length: int = 60, nextn: int = 5) -> bool:
        reference, worker = unrounded(checkpoint, nextn)
        ids = random_ids(checkpoint, length)
        feed(worker, ids, 0, length - 1)
        try:
            agree(draft(worker, ids), reference.block(ids, nextn))
        except AssertionError:
            return True
        return False

    def test_nothing_planted(self, open_checkpoint: OpenCheckpoint) -> None:
        assert not self.broken(open_checkpoint("nano", 0, False))

    def test_positions_off_by_one(
        self, open_checkpoint: OpenCheckpoint, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def shifted(self: Worker, plans: Sequence[DraftPlan]) -> Tensor:
            moved = [DraftPlan(p.golden, p.position + 1, p.state_slot) for p in plans]
            return original(self, moved)

        original = Worker.draft_hidden
        monkeypatch.setattr(Worker, "draft_hidden", shifted)
        assert self.broken(open_checkpoint("nano", 0, False))

    def test_keys_of_the_block_hidden_from_earlier_rows(
        self, open_checkpoint: OpenCheckpoint, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        attend = engine_drafts.sink_attention

        def causal(*args: object) -> Tensor:
            index = args[2].clone()  # type: ignore[attr-defined]
            block = index.shape[0]
            for row in range(block - 1):
                index[row, index.shape[1] - block + row + 1 :] = -1
            return attend(*args[:2], index, *args[3:])  # type: ignore[arg-type]

        monkeypatch.setattr(engine_drafts, "sink_attention", causal)
        assert self.broken(open_checkpoint("nano", 0, False))

    def test_features_without_the_main_norm(
        self, open_checkpoint: OpenCheckpoint, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        norm = engine_drafts.rms_norm

        def skipped(x: Tensor, weight: Tensor, eps: float, arithmetic: Arithmetic) -> Tensor:
            wanted = norm(x, weight, eps, arithmetic)
            return x if x.shape[0] > 10 else wanted

        monkeypatch.setattr(engine_drafts, "rms_norm", skipped)
        assert self.broken(open_checkpoint("nano", 0, False))

    def test_confidence_from_the_normed_state(
        self, open_checkpoint: OpenCheckpoint, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        confidence = engine_drafts.confidence
        monkeypatch.setattr(
            engine_drafts, "confidence", lambda hidden, *rest: confidence(hidden * 0.5, *rest)
        )
        assert self.broken(open_checkpoint("nano", 0, False))


def test_greedy_drafting_is_one_graph(open_checkpoint: OpenCheckpoint) -> None:
    """From the post norm to the last argmax nothing breaks the capture or asks the host."""
    checkpoint = open_checkpoint("nano", 0, False)
    worker = worker_of(checkpoint, free_arithmetic(), 5)
    heads, head = worker.draft_heads, worker.network.head
    graphs: list[torch.fx.GraphModule] = []

    def count(graph: torch.fx.GraphModule, _: list[Tensor]) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    hidden = torch.randn(15, checkpoint.config.hidden_size).bfloat16()
    golden, scale = torch.tensor([1, 2, 3]), torch.ones(5)
    expected = heads.greedy(hidden, golden, scale, head)
    captured = torch.compile(heads.greedy, backend=count, fullgraph=True, dynamic=False)
    tokens, trust = captured(hidden, golden, scale, head)
    assert len(graphs) == 1
    assert not [node for node in graphs[0].graph.nodes if node.target in ("item", "tolist")]
    assert torch.equal(tokens, expected[0])
    assert torch.allclose(trust, expected[1])
