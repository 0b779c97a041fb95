"""Torch's own summation order: greedy tokens still agree on calm weights, except at near-ties."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from deepinfer_neuron.engine.outputs import CompletionOutput
from deepinfer_neuron.llm import LLM, SamplingParams

CheckpointDir = Callable[..., Path]
TOKENS = 24
PARAMS = SamplingParams(
    temperature=0.0, max_tokens=TOKENS, ignore_eos=True, logprobs=2, logprobs_mode="raw"
)


def run(
    directory: Path, prompts: list[list[int]], sequences: int, nextn: int = 0
) -> list[CompletionOutput]:
    with LLM(
        directory,
        nextn=nextn,
        max_num_seqs=sequences,
        max_num_batched_tokens=96,
        max_model_len=512,
    ) as llm:
        batch = [{"prompt_token_ids": ids} for ids in prompts]
        return [item.outputs[0] for item in llm.generate(batch, PARAMS, use_tqdm=False)]


def first_difference(a: CompletionOutput, b: CompletionOutput) -> int:
    """Tokens that two completions have in common."""
    pairs = zip(a.token_ids, b.token_ids, strict=True)
    return next((i for i, (x, y) in enumerate(pairs) if x != y), TOKENS)


@pytest.mark.parametrize(("seed", "nextn"), [(0, 0), (1, 5)])
def test_a_batch_departs_from_lone_runs_only_at_near_ties(
    checkpoint_dir: CheckpointDir, seed: int, nextn: int
) -> None:
    """A near-tie: the two best logits are closer than twice what the order moves them elsewhere.

    The lone runs have no drafts.
    """
    rng = random.Random(seed)
    prompts = [[rng.randrange(3, 512) for _ in range(rng.randint(1, 200))] for _ in range(12)]
    directory = checkpoint_dir("nano", seed)
    alone, together = run(directory, prompts, 1), run(directory, prompts, 12, nextn)
    common = [first_difference(a, b) for a, b in zip(alone, together, strict=True)]
    noise = 0.0
    for one, many, count in zip(alone, together, common, strict=True):
        assert one.logprobs is not None
        assert many.logprobs is not None
        for x, y in zip(one.logprobs[:count], many.logprobs[:count], strict=True):
            noise = max(noise, abs(x.logprob - y.logprob))
    assert noise < 0.5, "the calm checkpoint is not calm"
    assert sum(common) >= 0.8 * TOKENS * len(prompts)
    for one, count in zip(alone, common, strict=True):
        if count < TOKENS and one.logprobs is not None:
            (_, best), (_, second) = one.logprobs[count].top
            assert best - second <= 2 * noise
