"""What a request may ask of its tokens."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from deepinfer_neuron.errors import RequestError

_MAX_TOKENS = 2**31 - 1


@dataclass(frozen=True)
class SamplingParams:
    """Sampling settings of one request.

    Attributes:
        temperature: 0 for greedy decoding (lowest id among equal logits), else the divisor of the
            logits.
        max_tokens: most tokens to generate, 1 to 2^31 - 1.
        seed: seed of this request's randomness in [0, 2^64); ``None`` takes one from the engine.
        ignore_eos: keep going after the end-of-sequence token.

    Raises:
        RequestError: a value outside its range.
    """

    temperature: float = 1.0
    max_tokens: int = 16
    seed: int | None = None
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        number = isinstance(self.temperature, (int, float)) and not _is_bool(self.temperature)
        if not number or not 0 <= self.temperature <= sys.float_info.max:
            raise RequestError(
                f"temperature is {self.temperature!r}; give a finite number of at least 0 "
                "(0 decodes greedily)"
            )
        _require_integer("max_tokens", self.max_tokens, 1, _MAX_TOKENS)
        if self.seed is not None:
            _require_integer("seed", self.seed, 0, 2**64 - 1)
        if not _is_bool(self.ignore_eos):
            raise RequestError(f"ignore_eos is {self.ignore_eos!r}; give True or False")


def _is_bool(value: object) -> bool:
    return isinstance(value, bool)


def _require_integer(name: str, value: object, low: int, high: int) -> None:
    if not isinstance(value, int) or _is_bool(value) or not low <= value <= high:
        raise RequestError(f"{name} is {value!r}; give an integer from {low} to {high}")
