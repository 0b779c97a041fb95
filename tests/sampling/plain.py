"""The sampling rules once more, one number at a time and without tensors.

Integers and fractions where the rules are exact, Python floats where they are not. Nothing here
shares a line with the engine.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from fractions import Fraction

import numpy as np
import torch
from torch import Tensor

from deepinfer_neuron.ops.arithmetic import fixed_arithmetic
from deepinfer_neuron.sampling.logprobs import TokenResult
from deepinfer_neuron.sampling.params import SamplingParams
from deepinfer_neuron.sampling.sampler import Sampler
from deepinfer_neuron.sampling.state import SamplingState

MASK32 = 2**32 - 1
EOS = 1


def philox(counter: Iterable[int], key: Iterable[int]) -> tuple[int, int, int, int]:
    """Philox4x32-10 on Python integers, which have no width to overflow."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for number in range(10):
        if number:
            k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
        first, second = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (
            (second >> 32) ^ c1 ^ k0,
            second & MASK32,
            (first >> 32) ^ c3 ^ k1,
            (first & MASK32),
        )
    return c0, c1, c2, c3


def words(seed: int, position: int, case: int) -> tuple[int, int, int, int]:
    """Random words of a draw: the sequence number wraps like an int32 and is sign-extended."""
    sequence = (3 * position + case + 2**31) % 2**32 - 2**31
    wide = sequence % 2**64
    return philox((0, 0, wide & MASK32, wide >> 32), (seed & MASK32, seed >> 32))


def slots(width: int) -> int:
    """Number of slots of the two-level draw."""
    if width >= 8192:
        return 4096
    power = 64
    while power < width and power < 2048:
        power *= 2
    return power


def draw(probabilities: Sequence[float], seed: int, position: int, case: int = 0) -> int | None:
    """One walk along the cumulative weights in the order (column mod slots, column div slots)."""
    weights = [min(math.floor(Fraction(p) * 2**31), 2**31 - 1) for p in probabilities]
    total = sum(weights)
    if total == 0:
        return None
    low, high, _, _ = words(seed, position, case)
    rest = (high * 2**32 + low) % total
    count = slots(len(weights))
    for column in sorted(range(len(weights)), key=lambda j: (j % count, j // count)):
        if rest < weights[column]:
            return column
        rest -= weights[column]
    raise AssertionError("the weights do not sum to their total")


def log_softmax(logits: Sequence[float], temperature: float, min_p: float = 0.0) -> list[float]:
    """Log-probabilities in double precision."""
    largest = max(logits)
    scaled = [(x - largest) / temperature for x in logits]
    if min_p > 0:
        scaled = [x if x >= math.log(min_p) else -math.inf for x in scaled]
    total = math.fsum(math.exp(x) for x in scaled)
    return [x - math.log(total) for x in scaled]


def ranks(logits: Sequence[float]) -> list[int]:
    """Ids by logit descending; Python's sort keeps the ids of equal logits in order."""
    return sorted(range(len(logits)), key=lambda j: -logits[j])


def kept(logits: Sequence[float], logprobs: Sequence[float], top_p: float, top_k: int) -> list[int]:
    """Ids that top-p and top-k leave, in rank order; sums of fp32 probabilities are fractions."""
    result: list[int] = []
    before = Fraction(0)
    for rank, token in enumerate(ranks(logits)):
        over = top_p < 1.0 and before > Fraction(float(np.float32(top_p)))
        if over or (top_k > 0 and rank >= top_k) or logprobs[token] == -math.inf:
            break
        result.append(token)
        before += Fraction(float(np.float32(math.exp(logprobs[token]))))
    return result


def penalised(
    logits: Sequence[float], prompt: Sequence[int], output: Sequence[int], params: SamplingParams
) -> list[float]:
    """Logits after the three penalties, in double precision."""
    result = list(logits)
    for token in set(prompt) | set(output):
        if token < len(result):
            factor = params.repetition_penalty
            result[token] = result[token] / factor if result[token] > 0 else result[token] * factor
    for token in set(output):
        result[token] -= params.frequency_penalty * output.count(token) + params.presence_penalty
    return result


def logits(rows: int, width: int, seed: int, scale: float = 2.0) -> Tensor:
    """Gaussian logits, fp32 ``[rows, width]``."""
    source = torch.Generator().manual_seed(seed)
    return torch.randn(rows, width, generator=source) * scale


def state(
    params: SamplingParams, width: int, seed: int = 0, prompt: Sequence[int] = (2, 3)
) -> SamplingState:
    """A fresh sequence with the end-of-sequence token 1."""
    return SamplingState(params, seed, prompt, EOS, width)


def sample(
    values: Tensor, params: SamplingParams, seed: int = 0, position: int = 2, **options: bool | int
) -> TokenResult:
    """The token after one row of logits, with fixed-order arithmetic; the logits stay."""
    width = values.shape[-1]
    sampler = Sampler(width, fixed_arithmetic(), **options)  # type: ignore[arg-type]
    [result] = sampler.sample(
        values.reshape(1, width).clone(), [state(params, width, seed)], [position]
    )
    return result
