"""Whatever else runs, and however the engine schedules: each request gets its lone run's result.

With the fixed-order arithmetic the comparison is bitwise, log-probabilities included.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from deepinfer_neuron.engine.core import NewRequest, Tracked
from deepinfer_neuron.llm import LLM
from tests.support.engine_load import Wish, lone_runs, random_wishes, result

CheckpointDir = Callable[..., Path]
VOCABULARY = 512
LONGEST = 300


def crowded(directory: Path, rng: random.Random, nextn: int = 0) -> LLM:
    """An engine with random limits, small enough that requests get in each other's way.

    Draws with drafts repeat only while every request has room for its whole block.
    """
    sequences = rng.choice([2, 5, 16])
    return LLM(
        directory,
        batch_invariant=True,
        nextn=nextn,
        max_num_seqs=sequences,
        max_num_batched_tokens=max(sequences * (nextn + 1), rng.choice([16, 50, 200, 512])),
        max_model_len=512,
        num_blocks=rng.choice([5, 7, 12, 60]),
        enable_prefix_caching=rng.random() < 0.7,
        prefill_attempt_interval=rng.choice([1, 1, 4]),
        asynchronous=rng.random() < 0.6,
        weights=rng.choice(["packed", "expanded"]),
    )


def run_crowd(llm: LLM, wishes: list[Wish], rng: random.Random) -> list[Tracked]:
    """Requests arrive at random moments; some are aborted at random moments."""
    waiting = list(enumerate(wishes))
    rng.shuffle(waiting)
    tracked: dict[int, Tracked] = {}
    while waiting or llm.engine.has_unfinished:
        for _ in range(rng.choice([0, 0, 1, 3])):
            if waiting:
                number, wish = waiting.pop()
                tracked[number] = llm.engine.add(
                    NewRequest(str(number), list(wish.prompt_token_ids), wish.params, wish.seed)
                )
        if rng.random() < 0.03 and tracked:
            llm.engine.abort(str(rng.choice(list(tracked))))
        llm.engine.step()
    return [tracked[number] for number in range(len(wishes))]


def check(directory: Path, seed: int, count: int) -> None:
    rng = random.Random(seed)
    wishes = random_wishes(rng, count, VOCABULARY, LONGEST, most_tokens=24)
    expected = lone_runs(directory, wishes)
    for _ in range(2):
        with crowded(directory, rng) as llm:
            crowd = run_crowd(llm, wishes, rng)
            compared = 0
            for item, (completion, prompt) in zip(crowd, expected, strict=True):
                got = result(item)
                if got[0].finish_reason == "abort":
                    assert got[0].token_ids == completion.token_ids[: len(got[0].token_ids)]
                    continue
                assert got == (completion, prompt)
                compared += 1
            stats = llm.stats()
            assert compared >= count // 2
            assert stats.blocks_used == stats.slots_used == stats.waiting == 0
            assert sum(stats.finished.values()) == count


@pytest.mark.parametrize("seed", range(3))
def test_a_crowd_gets_the_results_of_lone_runs(checkpoint_dir: CheckpointDir, seed: int) -> None:
    check(checkpoint_dir("nano", seed), seed, 14)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 103))
def test_many_crowds_get_the_results_of_lone_runs(checkpoint_dir: CheckpointDir, seed: int) -> None:
    check(checkpoint_dir("nano", seed % 4, wild=seed % 2 == 0), seed, 18)


def test_a_seed_gives_the_same_sample_in_any_batch(checkpoint_dir: CheckpointDir) -> None:
    rng = random.Random(9)
    wishes = random_wishes(rng, 6, VOCABULARY, 60, most_tokens=10)
    expected = lone_runs(checkpoint_dir("nano"), wishes[:1])[0]
    with crowded(checkpoint_dir("nano"), rng) as llm:
        first = run_crowd(llm, [wishes[0], *wishes[1:]], random.Random(1))[0]
        if first.completion.finish_reason != "abort":
            assert result(first) == expected
