"""With a fixed order of every sum, no way of running a prompt changes a bit of its logits.

The reference's logits of a long prompt serve all its prefixes: a row depends on nothing behind it.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from deepinfer_neuron.checkpoint.reader import Checkpoint
from deepinfer_neuron.llm import LLM, SamplingParams
from deepinfer_neuron.model import matrix
from deepinfer_neuron.ops import linear
from deepinfer_neuron.ops.arithmetic import FixedOrder, FreeOrder, fixed_arithmetic
from deepinfer_neuron.runner.worker import Worker
from tests.conftest import OpenCheckpoint
from tests.support.engine_runs import (
    Sides,
    fixed_order,
    free_order,
    make_worker,
    random_ids,
    run_alone,
)
from tests.support.prompt_lengths import border_lengths

STEPS = 64
KINDS = {"calm": False, "wild": True}
CHECKPOINTS = [(seed, kind) for seed in range(5) for kind in KINDS]


@dataclass(frozen=True)
class Known:
    """A prompt, the reference's logits of all its rows, and an engine to reproduce them."""

    sides: Sides
    ids: list[int]
    logits: Tensor

    @property
    def worker(self) -> Worker:
        """The engine."""
        return self.sides.worker

    def holds(self, length: int, cuts: tuple[int, ...] = ()) -> bool:
        """Whether the engine's logits of the first ``length`` tokens are the reference's."""
        found = run_alone(self.worker, self.ids[:length], cuts)
        return torch.equal(found, self.logits[:length])


def known(open_checkpoint: OpenCheckpoint, preset: str, seed: int, kind: str, length: int) -> Known:
    """A random prompt and its logits by the reference."""
    checkpoint = open_checkpoint(preset, seed, KINDS[kind])
    sides, ids = fixed_order(checkpoint), random_ids(checkpoint, length, seed=100 + seed)
    return Known(sides, ids, sides.network.logits(ids))


@pytest.fixture(scope="module", params=KINDS)
def nano(request: pytest.FixtureRequest, open_checkpoint: OpenCheckpoint) -> Known:
    """140 tokens: two blocks, every filter acts."""
    return known(open_checkpoint, "nano", 1, request.param, 140)


def random_cuts(length: int, draw: random.Random) -> tuple[int, ...]:
    """Up to five places to cut a prompt."""
    return tuple(sorted(draw.sample(range(1, length), draw.randrange(min(5, length - 1) + 1))))


def test_reference_rows_depend_on_nothing_behind_them(nano: Known) -> None:
    for length in (1, 2, 3, 9, 34, 66):
        prefix = nano.sides.network.logits(nano.ids[:length])
        assert torch.equal(prefix, nano.logits[:length])


@pytest.mark.parametrize(("seed", "kind"), CHECKPOINTS)
def test_border_lengths(open_checkpoint: OpenCheckpoint, seed: int, kind: str) -> None:
    """Each checkpoint takes its share of the lengths, at once and in chunks."""
    lengths = [n for n in border_lengths("nano") if n <= 129]
    lengths = lengths[CHECKPOINTS.index((seed, kind)) % 5 :: 5]
    prompt, draw = known(open_checkpoint, "nano", seed, kind, lengths[-1]), random.Random(seed)
    for length in lengths:
        assert prompt.holds(length), length
        cuts = random_cuts(length, draw)
        assert prompt.holds(length, cuts), (length, cuts)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("preset", "seed", "kind", "lengths"),
    [
        ("nano", 0, "wild", (255, 256, 257, 511, 699)),
        ("tiny", 0, "calm", (16, 17, 65, 129, 131)),
        ("tiny", 1, "wild", (131, 256, 257)),
        ("tiny", 2, "wild", (511, 514)),
    ],
)
def test_long_prompts(
    open_checkpoint: OpenCheckpoint, preset: str, seed: int, kind: str, lengths: tuple[int, ...]
) -> None:
    prompt, draw = known(open_checkpoint, preset, seed, kind, lengths[-1]), random.Random(seed)
    for length in lengths:
        cuts = random_cuts(length, draw)
        assert prompt.holds(length, cuts), (length, cuts)


@settings(deadline=None, derandomize=True, max_examples=8)
@given(data=st.data())
def test_any_cuts(nano: Known, data: st.DataObject) -> None:
    length = data.draw(st.integers(2, 140), "length")
    cuts = data.draw(st.sets(st.integers(1, length - 1), max_size=6), "cuts")
    assert nano.holds(length, tuple(sorted(cuts)))


@pytest.mark.parametrize(
    ("preset", "length"), [("nano", 68), pytest.param("tiny", 133, marks=pytest.mark.slow)]
)
def test_token_by_token(open_checkpoint: OpenCheckpoint, preset: str, length: int) -> None:
    """Until the filters act."""
    prompt = known(open_checkpoint, preset, 3, "wild", length)
    assert prompt.holds(length, tuple(range(1, length)))


def test_another_order_is_seen(nano: Known, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's order in all sums and products is enough to break the equality."""
    for name in ("sum", "matmul", "matmul_wide", "weighted_sum"):
        monkeypatch.setattr(FixedOrder, name, getattr(FreeOrder, name))
    assert not nano.holds(len(nano.ids))


# What must not matter besides.


@pytest.mark.parametrize("preset", ["nano", "tiny"])
def test_packed_weights(open_checkpoint: OpenCheckpoint, preset: str) -> None:
    prompt = known(open_checkpoint, preset, 2, "wild", 20)
    packed = make_worker(prompt.sides.network.checkpoint, fixed_arithmetic(), expanded=False)
    assert torch.equal(run_alone(packed, prompt.ids, (11, 19)), prompt.logits)


@pytest.mark.parametrize("elements", [1, 5000, 1 << 24])
def test_portions_of_decoded_weights(
    open_checkpoint: OpenCheckpoint, monkeypatch: pytest.MonkeyPatch, elements: int
) -> None:
    """Packed matrices are decoded a few rows at a time; how many must not matter."""
    prompt = known(open_checkpoint, "nano", 3, "wild", 20)
    packed = make_worker(prompt.sides.network.checkpoint, fixed_arithmetic(), expanded=False)
    for name in ("fp8_linear", "fp4_linear", "linear_fp32"):
        portioned = functools.partial(getattr(linear, name), chunk_elements=elements)
        monkeypatch.setattr(matrix, name, portioned)
    assert torch.equal(run_alone(packed, prompt.ids, (11, 19)), prompt.logits)


@pytest.fixture
def two_threads() -> Iterator[None]:
    """Two threads for every operator of torch."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_two_threads(nano: Known, two_threads: None) -> None:
    """The reference's logits were computed on as many threads as the session has, usually one."""
    assert nano.holds(50, (48,))


# Greedy decoding through the public interface.


@dataclass(frozen=True)
class Continued:
    """A prompt and the tokens that the engine added."""

    prompt: list[int]
    tokens: list[int]

    @property
    def ids(self) -> list[int]:
        """All of them."""
        return self.prompt + self.tokens

    def predicting(self, logits: Tensor) -> Tensor:
        """Of the logits of all rows, those that a token was chosen from."""
        return logits[len(self.prompt) - 1 : -1]


def continue_greedily(
    directory: Path, prompts: list[list[int]], *, batch_invariant: bool
) -> list[Continued]:
    """64 tokens for each of the prompts, all in one batch, prefilled 16 tokens at a time."""
    params = SamplingParams(temperature=0, max_tokens=STEPS, ignore_eos=True)
    with LLM(directory, batch_invariant=batch_invariant, max_num_batched_tokens=16) as llm:
        outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
    return [
        Continued(prompt, list(output.outputs[0].token_ids))
        for prompt, output in zip(prompts, outputs, strict=True)
    ]


def prompts_of(checkpoint: Checkpoint) -> list[list[int]]:
    """Prompts of 1, 9 and 40 tokens."""
    ids = random_ids(checkpoint, 50, seed=7)
    return [ids[:1], ids[1:10], ids[10:]]


def check_greedy_tokens(sides: Sides, found: Continued) -> Tensor:
    """Every token is the reference's choice; returns the logits of all rows."""
    logits = sides.network.logits(found.ids)
    assert len(found.tokens) == STEPS
    assert found.predicting(logits).argmax(1).tolist() == found.tokens
    return logits


SLOW_GREEDY = [
    pytest.param(preset, seed, marks=pytest.mark.slow)
    for preset, seed in (("nano", 1), ("tiny", 0), ("nano", 2), ("nano", 3), ("nano", 4))
]


@pytest.mark.parametrize(("preset", "seed"), [("nano", 0), *SLOW_GREEDY])
def test_greedy_tokens(open_checkpoint: OpenCheckpoint, preset: str, seed: int) -> None:
    checkpoint = open_checkpoint(preset, seed, wild=True)
    sides = fixed_order(checkpoint)
    for found in continue_greedily(
        checkpoint.directory, prompts_of(checkpoint), batch_invariant=True
    ):
        check_greedy_tokens(sides, found)


@pytest.mark.parametrize(("preset", "seed"), [("nano", 0), *SLOW_GREEDY[:2]])
def test_greedy_tokens_in_any_order(
    open_checkpoint: OpenCheckpoint, preset: str, seed: int
) -> None:
    """On a calm checkpoint torch's orders change a token only where two logits nearly agree.

    Nearly means: closer than what another order moves logits by, measured over the whole text.
    That is typically a small part of the distance between the best two logits.
    """
    checkpoint = open_checkpoint(preset, seed)
    sides, free = fixed_order(checkpoint), free_order(checkpoint).worker
    fixed_runs, free_runs = (
        continue_greedily(checkpoint.directory, prompts_of(checkpoint), batch_invariant=fixed)
        for fixed in (True, False)
    )
    for mine, other in zip(fixed_runs, free_runs, strict=True):
        logits = check_greedy_tokens(sides, mine)
        noise = (run_alone(free, mine.ids) - logits).abs().amax(1)
        best, second = mine.predicting(logits).topk(2).values.unbind(1)
        assert float(noise.median()) < 0.25 * float((best - second).median())
        changed = [a != b for a, b in zip(mine.tokens, other.tokens, strict=True)]
        if any(changed):
            first = changed.index(True)
            assert float(best[first] - second[first]) <= 2 * float(noise.max())
