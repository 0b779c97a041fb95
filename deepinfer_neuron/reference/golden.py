"""Golden tokens: greedy continuations by the reference computation, kept beside a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from deepinfer_neuron.checkpoint.reader import Checkpoint
from deepinfer_neuron.errors import CheckpointError
from deepinfer_neuron.reference.network import Network, lowest_maximum

FILE_NAME = "golden_tokens.json"
TOKENS = 9
"""Golden tokens per prompt."""
LENGTHS = {"short": 12, "long": 200}
"""Prompt tokens by name; the long one is longer than a cache block and a window."""

_TRIES = 6
_CLEAR_MARGIN = 0.02
"""Distance of the two largest logits that is looked for, far above what orders of sums move."""


@dataclass(frozen=True)
class GoldenPrompt:
    """A prompt and the tokens that follow it at temperature 0."""

    name: str
    prompt_token_ids: list[int]
    token_ids: list[int]
    margin: float
    """Least distance between the two largest logits along the way."""


def compute(checkpoint: Checkpoint) -> list[GoldenPrompt]:
    """Golden prompts of a checkpoint, the same for the same files.

    Of several random prompts per length the one with the clearest decisions is kept.
    """
    network = Network(checkpoint)
    found = []
    for name, length in LENGTHS.items():
        best: GoldenPrompt | None = None
        for attempt in range(_TRIES):
            prompt = _random_prompt(checkpoint, length, attempt)
            candidate = golden_prompt(network, name, prompt)
            if best is None or candidate.margin > best.margin:
                best = candidate
            if best.margin >= _CLEAR_MARGIN:
                break
        assert best is not None
        found.append(best)
    return found


def save(directory: Path, prompts: Sequence[GoldenPrompt]) -> None:
    """Write the golden tokens into a checkpoint directory."""
    records = [vars(prompt) for prompt in prompts]
    (directory / FILE_NAME).write_text(json.dumps(records) + "\n")


def load(directory: Path) -> list[GoldenPrompt]:
    """Read the golden tokens of a checkpoint.

    Raises:
        CheckpointError: there are none, or the file is damaged.
    """
    path = directory / FILE_NAME
    try:
        return [
            GoldenPrompt(
                str(record["name"]),
                [int(token) for token in record["prompt_token_ids"]],
                [int(token) for token in record["token_ids"]],
                float(record["margin"]),
            )
            for record in json.loads(path.read_text())
        ]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise CheckpointError(
            f"{path} holds no golden tokens ({type(error).__name__}: {error}); write them with "
            "`deepinfer-neuron tiny --golden`"
        ) from error


def _random_prompt(checkpoint: Checkpoint, length: int, attempt: int) -> list[int]:
    generator = np.random.default_rng([length, attempt])
    return [int(t) for t in generator.integers(3, checkpoint.config.vocab_size // 2, length)]


def golden_prompt(network: Network, name: str, prompt: Sequence[int]) -> GoldenPrompt:
    """A prompt with its golden tokens."""
    tokens, margin = list(prompt), float("inf")
    for _ in range(TOKENS):
        logits = network.logits(tokens)[-1]
        first, second = logits.topk(2).values.tolist()
        margin = min(margin, first - second)
        tokens.append(int(lowest_maximum(logits)))
    return GoldenPrompt(name, list(prompt), tokens[len(prompt) :], margin)
