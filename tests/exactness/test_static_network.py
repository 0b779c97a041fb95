"""Passes of static shape against the ragged network of the host, bit for bit.

With a fixed order of sums both must agree in every bit: the static network addresses the same keys
in another way, pads every size to a power of two, and uses the forms of the operators that graph
compilers take.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from torch import Tensor

from deepinfer_neuron.checkpoint.reader import Checkpoint
from deepinfer_neuron.model.shapes import PassShape
from deepinfer_neuron.ops.arithmetic import Arithmetic, FixedOrder, fixed_arithmetic
from deepinfer_neuron.platform import CpuPlatform
from deepinfer_neuron.platform.regions import Regions
from deepinfer_neuron.runner.buckets import Ladder
from deepinfer_neuron.runner.pack import ChunkPlan
from deepinfer_neuron.runner.pack_drafts import DraftPlan
from deepinfer_neuron.runner.pack_static import StaticPlan
from deepinfer_neuron.runner.static_worker import PassOutcome, StaticWorker
from deepinfer_neuron.runner.worker import Worker
from tests.conftest import OpenCheckpoint

NEXTN = 5
LENGTH = 512
GRAPH = Arithmetic(FixedOrder(), graph=True)
HOST_FORMS = fixed_arithmetic()


@dataclass
class Sequence_:
    """A sequence that grows step by step."""

    slot: int
    table: list[int]
    tokens: list[int] = field(default_factory=list)
    drafts: int = 0

    def chunk(self, worker: Worker, begin: int, outputs: int) -> ChunkPlan:
        codes = worker.compress(self.tokens)
        rows = worker.engram_rows([(codes, begin)])
        return ChunkPlan(self.tokens[begin:], begin, self.slot, self.table, rows, outputs)


class Pair:
    """The same model twice: ragged and static, with caches of the same sizes."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        arithmetic: Arithmetic,
        nextn: int = NEXTN,
        expanded: bool | frozenset[str] = False,
        host_embed: bool = False,
    ) -> None:
        self.nextn = nextn
        self.ragged = Worker(
            checkpoint, fixed_arithmetic(), expanded=True, max_length=LENGTH, nextn=nextn
        )
        ladder = Ladder.build(
            max_num_seqs=4, max_num_batched_tokens=256, max_model_len=LENGTH, nextn=nextn,
            lowest_prefill=1,
        )  # fmt: skip
        self.static = StaticWorker(
            checkpoint, arithmetic, CpuPlatform(), Regions(), ladder, expanded=expanded,
            host_embed=host_embed, max_length=LENGTH, nextn=nextn, temperatures=(1.0,) * nextn,
        )  # fmt: skip
        self.ragged.allocate(20, 4, 6)
        self.static.allocate(20, 4, 6)

    def step(
        self, sequences: Sequence[Sequence_], begins: Sequence[int], shape: PassShape
    ) -> tuple[Tensor, Tensor, PassOutcome]:
        """Both run the tokens from ``begins`` on; asserts equal logits and drafts."""
        chunks = [
            item.chunk(self.ragged, begin, 1 + item.drafts)
            for item, begin in zip(sequences, begins, strict=True)
        ]
        expected = self.ragged.logits(self.ragged.hidden(chunks))
        plans = [StaticPlan(c, item.drafts) for c, item in zip(chunks, sequences, strict=True)]
        queued = self.static.queue(plans, shape)
        rows = self.static.logits(queued).view(shape.sequences, shape.outputs, -1)
        found = torch.cat([rows[i, : 1 + item.drafts] for i, item in enumerate(sequences)])
        return expected, found, self.static.verify(queued, len(plans))

    def expected_drafts(
        self, sequences: Sequence[Sequence_], outcome: PassOutcome
    ) -> tuple[Tensor, Tensor]:
        """Tokens and confidences that the ragged draft blocks propose behind an outcome."""
        plans = []
        for place, item in enumerate(sequences):
            accepted = int(outcome.accepted[place])
            golden = int(outcome.tokens[place, accepted])
            position = len(item.tokens) - item.drafts + accepted
            plans.append(DraftPlan(golden, position, item.slot))
        hidden = self.ragged.draft_hidden(plans)
        golden_tokens = torch.tensor([plan.golden for plan in plans])
        ones = torch.ones(self.nextn)
        head = self.ragged.network.head
        return self.ragged.draft_heads.greedy(hidden, golden_tokens, ones, head)


def grow(item: Sequence_, count: int, rng: np.random.Generator, vocabulary: int) -> int:
    """Append tokens; returns the first new position."""
    begin = len(item.tokens)
    item.tokens += rng.integers(5, vocabulary - 40, size=count).tolist()
    return begin


def check(pair: Pair, sequences: Sequence[Sequence_], begins: list[int], shape: PassShape) -> None:
    expected, found, outcome = pair.step(sequences, begins, shape)
    assert torch.equal(expected, found)
    rows = expected.split([1 + item.drafts for item in sequences])
    for place, (item, own) in enumerate(zip(sequences, rows, strict=True)):
        best = own.argmax(-1).tolist()
        assert outcome.tokens[place, : len(best)].tolist() == best
        proposed = item.tokens[len(item.tokens) - item.drafts :]
        agreeing = [a == b for a, b in zip(proposed, best, strict=False)]
        assert int(outcome.accepted[place]) == [*agreeing, False].index(False)
    if pair.nextn:
        tokens, trust = pair.expected_drafts(sequences, outcome)
        assert torch.equal(tokens.to(torch.int32), outcome.drafts)
        assert torch.equal(trust, outcome.confidences)


# Lengths around blocks (128), windows (8), candidate blocks and their limits.
PROMPTS = ((1, 2, 3), (7, 9, 17), (64, 65, 33), (127, 128, 130), (250, 5, 96))


@pytest.mark.parametrize("arithmetic", [HOST_FORMS, GRAPH], ids=["host forms", "graph forms"])
@pytest.mark.parametrize("lengths", PROMPTS, ids=str)
def test_prompts_and_steps_with_drafts_equal_the_ragged_network(
    lengths: tuple[int, ...], arithmetic: Arithmetic, open_checkpoint: OpenCheckpoint
) -> None:
    """Prompts in pieces, then steps of three sequences with 3, 5 and no drafts, in passes of 4."""
    checkpoint = open_checkpoint("nano")
    pair, rng = Pair(checkpoint, arithmetic), np.random.default_rng(sum(lengths))
    vocabulary = checkpoint.config.vocab_size
    tables = ([3, 7, 9], [5, 6, 12], [11, 2, 4])
    sequences = [Sequence_(slot + 1, table) for slot, table in enumerate(tables)]
    for item, length in zip(sequences, lengths, strict=True):
        for piece in ((length + 1) // 2, length // 2):
            if piece:
                begin = grow(item, piece, rng, vocabulary)
                rows = 1 << (piece - 1).bit_length()
                check(pair, [item], [begin], PassShape(1, rows, 4, 1))
    for _ in range(2):
        begins = []
        for item, drafts in zip(sequences, (3, 5, 0), strict=True):
            begins.append(grow(item, 1 + drafts, rng, vocabulary))
            item.drafts = drafts
        check(pair, sequences, begins, PassShape(4, 8, 4, 1 + NEXTN))


@pytest.mark.parametrize("width", [2, 4, 8])
def test_wider_block_tables_change_nothing(width: int, open_checkpoint: OpenCheckpoint) -> None:
    """A table of 8 blocks is behind the candidate limit of nano, one of 2 before it."""
    checkpoint = open_checkpoint("nano", 3, True)
    pair, rng = Pair(checkpoint, GRAPH), np.random.default_rng(width)
    item = Sequence_(2, [4, 9])
    begin = grow(item, 150, rng, checkpoint.config.vocab_size)
    check(pair, [item], [begin], PassShape(1, 256, width, 1))
    item.drafts = 5
    begin = grow(item, 6, rng, checkpoint.config.vocab_size)
    check(pair, [item], [begin], PassShape(2, 8, width, 6))


def test_one_row_without_drafts(open_checkpoint: OpenCheckpoint) -> None:
    """The narrowest passes: one sequence of one row; every second row completes a pair."""
    checkpoint = open_checkpoint("nano")
    pair, rng = Pair(checkpoint, GRAPH, nextn=0), np.random.default_rng(1)
    item = Sequence_(1, [3])
    for _ in range(12):
        begin = grow(item, 1, rng, checkpoint.config.vocab_size)
        check(pair, [item], [begin], PassShape(1, 1, 1, 1))


def test_what_lies_in_the_padding_is_never_seen(open_checkpoint: OpenCheckpoint) -> None:
    """Block 0, page 0 and slot 0 hold garbage; live rows do not change."""
    checkpoint = open_checkpoint("nano")
    pair, rng = Pair(checkpoint, GRAPH), np.random.default_rng(2)
    caches, geometry = pair.static.caches, pair.static.geometry
    generator = torch.Generator().manual_seed(0)
    for cache in caches.backbone:
        cache.window.ring[: geometry.window_ring].random_(generator=generator)
        cache.window.pages[: geometry.page_tail].random_(generator=generator)
        if cache.source.pairs is not None:
            cache.source.pairs[: geometry.pair_ring].fill_(1e30)
    item = Sequence_(1, [3, 5])
    begin = grow(item, 70, rng, checkpoint.config.vocab_size)
    check(pair, [item], [begin], PassShape(1, 128, 2, 1))
    item.drafts = 2
    begin = grow(item, 3, rng, checkpoint.config.vocab_size)
    check(pair, [item], [begin], PassShape(4, 8, 2, 6))


def test_any_choice_of_expanded_matrices_gives_the_same_bits(
    open_checkpoint: OpenCheckpoint,
) -> None:
    """Some experts, some projections and both kinds of draft matrices are decoded once."""
    checkpoint = open_checkpoint("nano")
    names = frozenset(
        {f"layers.{layer}.ffn.experts.{expert}.w2" for layer in range(9) for expert in (1, 4)}
        | {f"layers.{layer}.attn.wo_a" for layer in range(9)}
        | {"layers.3.ffn.experts.0.w1", "mtp.0.main_proj", "mtp.1.ffn.experts.5.w3"}
    )
    pair, rng = Pair(checkpoint, GRAPH, expanded=names), np.random.default_rng(5)
    held = {
        name for name, _ in pair.static.network.named_buffers() if name.endswith("experts.w2_wide")
    }
    assert len(held) == 9
    item = Sequence_(1, [3])
    begin = grow(item, 20, rng, checkpoint.config.vocab_size)
    check(pair, [item], [begin], PassShape(1, 32, 1, 1))


def test_the_embedding_may_stay_in_host_memory(open_checkpoint: OpenCheckpoint) -> None:
    """Same bits, at the price of copies: embedded rows for the pass and for its drafts."""
    checkpoint = open_checkpoint("nano")
    pair, rng = Pair(checkpoint, GRAPH, host_embed=True), np.random.default_rng(6)
    item = Sequence_(1, [3])
    begin = grow(item, 20, rng, checkpoint.config.vocab_size)
    check(pair, [item], [begin], PassShape(1, 32, 1, 1))
    item.drafts = 4
    begin = grow(item, 5, rng, checkpoint.config.vocab_size)
    uploads = pair.static.uploads
    check(pair, [item], [begin], PassShape(2, 8, 1, 6))
    assert pair.static.uploads == uploads + 3
    assert pair.static.network.embedding.table is None
