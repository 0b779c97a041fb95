"""Thousands of random requests against a small pool: nothing leaks, nothing is lost."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from deepinfer_neuron.engine.core import NewRequest, Tracked
from deepinfer_neuron.llm import LLM
from deepinfer_neuron.sampling.params import SamplingParams
from deepinfer_neuron.sampling.structured import StructuredOutput
from tests.support.engine_load import Wish, random_wishes

CheckpointDir = Callable[..., Path]
VOCABULARY = 512
GRAMMARS = (
    StructuredOutput(regex="[ab]{1,4}"),
    StructuredOutput(regex="(yes|no)!"),
    StructuredOutput(json_schema='{"type": "integer", "minimum": 0, "maximum": 99}'),
    StructuredOutput(regex="(unclosed"),
)


def with_grammars(wishes: list[Wish], rng: random.Random) -> list[Wish]:
    """Some requests follow a grammar; the last grammar is wrong."""
    result = []
    for wish in wishes:
        if rng.random() < 0.15:
            params = SamplingParams(
                temperature=1.0, max_tokens=12, structured_output=rng.choice(GRAMMARS)
            )
            result.append(Wish(wish.prompt_token_ids, params, wish.seed))
        else:
            result.append(wish)
    return result


def soak(directory: Path, count: int, seed: int) -> None:
    rng = random.Random(seed)
    wishes = with_grammars(random_wishes(rng, count, VOCABULARY, 150, most_tokens=10), rng)
    with LLM(
        directory, max_num_seqs=24, max_num_batched_tokens=400, max_model_len=256, num_blocks=18
    ) as llm:
        waiting = list(enumerate(wishes))
        tracked: dict[int, Tracked] = {}
        ends: Counter[str] = Counter()
        while waiting or llm.engine.has_unfinished:
            while waiting and len(tracked) - sum(ends.values()) < 60:
                number, wish = waiting.pop()
                tracked[number] = llm.engine.add(
                    NewRequest(str(number), list(wish.prompt_token_ids), wish.params, wish.seed)
                )
            if rng.random() < 0.1:
                llm.engine.abort(str(rng.choice(list(tracked))))
            for item in llm.engine.step():
                if item.finished:
                    ends[item.request.request_id] += 1
            for number, item in tracked.items():
                if item.finished and item.completion.finish_reason == "abort":
                    ends[str(number)] = 1
        stats = llm.stats()
    assert set(ends.values()) == {1}, "a request was answered twice"
    assert len(ends) == count, "a request was lost"
    reasons = Counter(item.completion.finish_reason for item in tracked.values())
    assert stats.finished == {str(reason): number for reason, number in reasons.items()}
    assert stats.blocks_used == stats.slots_used == stats.waiting == stats.running == 0
    assert stats.preemptions > 0, "the pool was never short: the test is too easy"
    for number, item in tracked.items():
        grammar = wishes[number].params.structured_output
        wrong = grammar is GRAMMARS[-1]
        failed = item.completion.finish_reason == "error"
        assert failed <= wrong, item.completion.stop_reason
        if not wrong and item.completion.finish_reason != "abort":
            assert item.completion.token_ids


def test_a_short_soak(checkpoint_dir: CheckpointDir) -> None:
    soak(checkpoint_dir("nano"), 300, seed=1)


@pytest.mark.soak
def test_a_long_soak(checkpoint_dir: CheckpointDir) -> None:
    soak(checkpoint_dir("nano"), 5000, seed=2)
