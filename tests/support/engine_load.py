"""Random loads for an engine, and their lone runs to compare with."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from deepinfer_neuron.engine.core import NewRequest, Tracked
from deepinfer_neuron.engine.outputs import CompletionOutput
from deepinfer_neuron.llm import LLM
from deepinfer_neuron.sampling.params import SamplingParams


@dataclass(frozen=True)
class Wish:
    """A request of a random load."""

    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    seed: int


def random_params(rng: random.Random, most_tokens: int) -> SamplingParams:
    """Sampling parameters of every kind, log-probabilities included."""
    return SamplingParams(
        temperature=rng.choice([0.0, 0.0, 0.7, 1.0]),
        top_p=rng.choice([1.0, 0.9]),
        top_k=rng.choice([-1, 20]),
        min_p=rng.choice([0.0, 0.0, 0.02]),
        max_tokens=rng.randint(1, most_tokens),
        repetition_penalty=rng.choice([1.0, 1.0, 1.3]),
        frequency_penalty=rng.choice([0.0, 0.0, 0.5]),
        logprobs=rng.choice([0, 2]),
        prompt_logprobs=rng.choice([None, None, None, 1]),
        ignore_eos=rng.random() < 0.8,
        stop_token_ids=rng.sample(range(60, 500), 2),
    )


def random_wishes(
    rng: random.Random, count: int, vocab_size: int, longest: int, most_tokens: int
) -> list[Wish]:
    """Requests with shared prefixes, duplicates, and lengths around block borders."""
    bases = [[rng.randrange(3, vocab_size) for _ in range(longest)] for _ in range(3)]
    wishes: list[Wish] = []
    for _ in range(count):
        if wishes and rng.random() < 0.1:
            wishes.append(rng.choice(wishes))
            continue
        length = rng.choice([1, 2, rng.randint(1, 40), 127, 128, 129, rng.randint(1, longest)])
        length = min(length, longest)
        shared = rng.choice([0, 0, 16, 128, length])
        base = rng.choice(bases)
        tail = [rng.randrange(3, vocab_size) for _ in range(length)]
        prompt = tuple((base[:shared] + tail)[:length])
        wishes.append(Wish(prompt, random_params(rng, most_tokens), rng.getrandbits(64)))
    return wishes


def result(tracked: Tracked) -> tuple[CompletionOutput, object]:
    """Everything a caller sees of a completion, ready to be compared."""
    return tracked.completion.output(), tracked.prompt_logprobs()


def lone_runs(
    directory: Path, wishes: Sequence[Wish], nextn: int = 0
) -> list[tuple[CompletionOutput, object]]:
    """Results of each wish alone: no batch, no chunks, no cache, synchronous, fixed order."""
    results: dict[Wish, tuple[CompletionOutput, object]] = {}
    with LLM(
        directory,
        batch_invariant=True,
        nextn=nextn,
        max_num_seqs=1,
        max_num_batched_tokens=2048,
        max_model_len=1024,
        enable_prefix_caching=False,
        asynchronous=False,
    ) as llm:
        for number, wish in enumerate(wishes):
            if wish in results:
                continue
            tracked = llm.engine.add(
                NewRequest(str(number), list(wish.prompt_token_ids), wish.params, wish.seed)
            )
            while not tracked.finished:
                llm.engine.step()
            results[wish] = result(tracked)
    return [results[wish] for wish in wishes]
