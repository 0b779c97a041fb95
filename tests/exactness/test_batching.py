"""With a fixed order of every sum a request's results do not depend on its neighbours.

Whatever shares a step with it, wherever its keys live and however it is cut: its logits are those
of the reference, in every bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from deepinfer_neuron.llm import LLM, SamplingParams
from deepinfer_neuron.runner.worker import Worker, blocks_for
from tests.conftest import CheckpointDir, OpenCheckpoint
from tests.support.engine_runs import Request, fixed_order, random_ids, run_step, spans

LONGEST = 140


@dataclass(frozen=True)
class Streams:
    """Two texts whose prefixes serve as prompts, and the reference's logits of each."""

    worker: Worker
    ids: list[list[int]]
    logits: list[Tensor]


@pytest.fixture(scope="module")
def streams(open_checkpoint: OpenCheckpoint) -> Streams:
    """Two texts of two blocks each."""
    checkpoint = open_checkpoint("nano", 2, wild=True)
    sides = fixed_order(checkpoint)
    ids = [random_ids(checkpoint, LONGEST, seed=seed) for seed in (1, 2)]
    return Streams(sides.worker, ids, [sides.network.logits(text) for text in ids])


@dataclass
class Member:
    """One sequence of a batch."""

    stream: int
    request: Request
    chunks: list[tuple[int, int]]
    """Still to run."""
    logits: list[Tensor] = field(default_factory=list)


@st.composite
def batches(draw: st.DrawFn) -> list[Member]:
    """Two to four prompts, cut anywhere, in blocks and slots of any order."""
    count = draw(st.integers(2, 4))
    blocks = draw(st.permutations(range(1, 2 * count + 3)))
    slots = draw(st.permutations(range(1, count + 2)))
    members = []
    for slot in slots[:count]:
        length = draw(st.integers(1, LONGEST))
        cuts = draw(st.sets(st.integers(1, LONGEST), max_size=3))
        table = [blocks.pop() for _ in range(blocks_for(length))]
        chunks = spans(length, sorted(cut for cut in cuts if cut < length))
        members.append(Member(draw(st.integers(0, 1)), Request((), slot, table), chunks))
    return members


def run_together(streams: Streams, members: list[Member]) -> None:
    """One step with the next chunk of each of the members."""
    plans = []
    for member in members:
        start, stop = member.chunks.pop(0)
        request = replace(member.request, ids=streams.ids[member.stream][:stop])
        plans.append(request.plan(streams.worker, start, stop))
    for member, rows in zip(members, run_step(streams.worker, plans), strict=True):
        member.logits.append(rows)


def assert_exact(streams: Streams, members: list[Member]) -> None:
    """All logits of all members are the reference's."""
    for member in members:
        found = torch.cat(member.logits)
        assert torch.equal(found, streams.logits[member.stream][: len(found)])


@settings(deadline=None, derandomize=True, max_examples=20)
@given(data=st.data())
def test_any_company(streams: Streams, data: st.DataObject) -> None:
    """Every step runs some of the unfinished sequences, in any order."""
    members = data.draw(batches(), "batch")
    streams.worker.allocate(2 * len(members) + 2, len(members) + 1)
    while waiting := [index for index, member in enumerate(members) if member.chunks]:
        order = data.draw(st.permutations(waiting), "order")
        size = data.draw(st.integers(1, len(waiting)), "size")
        run_together(streams, [members[index] for index in order[:size]])
    assert_exact(streams, members)


def test_decoding_beside_a_prefill(streams: Streams) -> None:
    """Two sequences decode while the prompt of a third arrives in chunks of odd sizes."""
    decoding = [
        Member(0, Request((), 3, (5, 1)), [(0, 120), *((p, p + 1) for p in range(120, 136))]),
        Member(1, Request((), 1, (2,)), [(0, 9), *((p, p + 1) for p in range(9, 25))]),
    ]
    arriving = Member(1, Request((), 2, (4, 3)), spans(140, [1, 2, 5, 44, 63, 64, 127, 130]))
    streams.worker.allocate(5, 3)
    run_together(streams, decoding)
    while decoding[0].chunks:
        rest = [arriving] if arriving.chunks else []
        run_together(streams, [decoding[0], *rest, decoding[1]])
    assert_exact(streams, [*decoding, arriving])


# The public interface.

KINDS = 6


@pytest.fixture(scope="module")
def llm(checkpoint_dir: CheckpointDir) -> Iterator[LLM]:
    """Runs at most 32 sequences together, so that 33 and 65 need another group."""
    directory = checkpoint_dir("nano", 3, wild=True)
    with LLM(directory, batch_invariant=True, max_num_batched_tokens=24) as loaded:
        yield loaded


def generate(llm: LLM, kinds: list[int]) -> list[list[int]]:
    """Three tokens for one request of each of the given kinds.

    A kind is a prompt of 1 to 31 tokens, and greedy decoding or drawing with a seed.
    """
    ids = random_ids(llm.checkpoint, 6 * KINDS)
    params = [
        SamplingParams(temperature=k % 2, seed=k, max_tokens=3, ignore_eos=True) for k in kinds
    ]
    prompts = [{"prompt_token_ids": ids[k : 7 * k + 1]} for k in kinds]
    return [list(o.outputs[0].token_ids) for o in llm.generate(prompts, params, use_tqdm=False)]


@pytest.fixture(scope="module")
def alone(llm: LLM) -> list[list[int]]:
    """The tokens of every kind of request that runs alone."""
    return [generate(llm, [kind])[0] for kind in range(KINDS)]


@pytest.mark.parametrize("size", [1, 2, 33, pytest.param(65, marks=pytest.mark.slow)])
def test_batch_sizes(llm: LLM, alone: list[list[int]], size: int) -> None:
    """Requests of one kind get the same tokens: those of a lone request."""
    kinds = [(5 * place + 3) % KINDS for place in range(size)]
    assert generate(llm, kinds) == [alone[kind] for kind in kinds]


@pytest.mark.parametrize(("sequences", "tokens"), [(1, 512), (3, 3), (5, 7), (64, 64)])
def test_limits_of_a_step(
    checkpoint_dir: CheckpointDir, alone: list[list[int]], sequences: int, tokens: int
) -> None:
    """How many sequences and prompt tokens share a step is a matter of speed only."""
    with LLM(
        checkpoint_dir("nano", 3, wild=True),
        batch_invariant=True,
        max_num_seqs=sequences,
        max_num_batched_tokens=tokens,
    ) as other:
        assert generate(other, list(range(KINDS))) == alone
