"""What an operator's benchmark needs: its sizes, its arguments, and two ways to compute it.

A case builder takes a number of rows and gives a :class:`Case`; the builders of all operators are
in :mod:`benchmarks.operator_table`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

INT32 = torch.int32
BF16 = torch.bfloat16
HEAD = 512
ROPE = 64
WINDOW = 128
PAGE = 128
NEXTN = 3
GROUP = 32
"""Channels per scale of a window key."""

RECORD = HEAD + HEAD // GROUP
"""Bytes of a window key."""

_MOST_LOGITS = 1 << 23
"""More logits than this make a case smaller: with intermediates they take over 500 MB."""


@dataclass(frozen=True)
class Sizes:
    """Sizes that differ between a full and a quick run.

    Attributes:
        decode: rows of the decode shapes.
        prefill: rows of the prefill shape.
        hidden: channels of the residual stream.
        vocab: tokens of the vocabulary.
        context: longest sequence.
        topk: compressed keys that a row reads, and the length of short token lists.
        table: rows of the table that rows are gathered from.
    """

    decode: tuple[int, ...]
    prefill: int
    hidden: int
    vocab: int
    context: int
    topk: int
    table: int

    @property
    def rows(self) -> tuple[int, ...]:
        """All numbers of rows."""
        return (*self.decode, self.prefill)

    @property
    def pages(self) -> int:
        """Pages of the longest sequence."""
        return self.context // PAGE

    def vocab_of(self, rows: int) -> tuple[int, str]:
        """Vocabulary of a case, and what to say if it is smaller than the released one."""
        if rows * self.vocab <= _MOST_LOGITS:
            return self.vocab, ""
        return self.vocab // 16, f"vocabulary of {self.vocab // 16} at {rows} rows"


FULL = Sizes((1, 8, 32, 64), 512, 5120, 129280, 65536, 512, 16384)
QUICK = Sizes((1, 4), 12, 128, 640, 1024, 32, 64)


@dataclass(frozen=True)
class Layout:
    """Description of a cache record; see ``CacheLayout`` of the operators."""

    quantized_dtype: str | None = "e4m3"
    quantized_elements: int = HEAD
    elements_per_sf: int = GROUP
    bf16_elements: int = 0
    do_cast: bool = True
    sf_format: str | None = "ue8m0"
    token_interleaved: bool = True


Formulation = Callable[[], Sequence[Tensor]]
"""A call that gives the results of an operator."""


@dataclass(frozen=True)
class Case:
    """One operator on arguments of one size.

    Both calls give the results in the same order; each works on buffers of its own. The plain
    formulation gets nothing that the kernel does not get: what it has to know of lengths and sizes
    it reads from the same arguments.

    Attributes:
        ours: calls the kernel, which writes its results to buffers.
        plain: computes the same with plain eager operations.
        in_place: how many of the last results the plain formulation leaves in buffers of its own;
            the others are new tensors, and :func:`check` copies them to buffers.
        bytes: read and written, every byte that is needed once.
        close: floating results agree to this part of the largest one; 0 means equal.
        differing: share of the integer or infinite results that may differ, where a value lies so
            close to a bound (between two codes, or of top-p) that the order of additions decides.
        note: what is smaller than in the released model.
    """

    ours: Formulation
    plain: Formulation
    bytes: int
    in_place: int = 0
    close: float = 0.0
    differing: float = 0.0
    note: str = ""


Builder = Callable[[int, Sizes], Case]


class Disagreement(ValueError):
    """The two formulations of an operator differ."""


def check(name: str, case: Case) -> Formulation:
    """Run both formulations once and compare.

    Returns:
        the plain formulation with its results in buffers, like those of the kernel.

    Raises:
        Disagreement: they give different results.
    """
    ours, theirs = case.ours(), case.plain()
    if len(ours) != len(theirs):
        raise Disagreement(f"{name}: {len(ours)} results, the plain formulation has {len(theirs)}")
    for number, (left, right) in enumerate(zip(ours, theirs, strict=True)):
        if left.shape != right.shape or not _agree(left, right, case):
            raise Disagreement(f"{name}: result {number} is not that of the plain formulation")
    buffers = [torch.empty_like(result) for result in ours[: len(ours) - case.in_place]]

    def buffered() -> Sequence[Tensor]:
        results = case.plain()
        for buffer, result in zip(buffers, results, strict=False):
            buffer.copy_(result)
        return [*buffers, *results[len(buffers) :]]

    return buffered


def _agree(left: Tensor, right: Tensor, case: Case) -> bool:
    if not left.is_floating_point():
        wrong = (left.to(torch.int64) != right.to(torch.int64)).sum()
        return int(wrong) <= case.differing * left.numel()
    a, b = left.to(torch.float64), right.to(torch.float64)
    finite = a.isfinite() & b.isfinite()
    if int((~finite & (a != b)).sum()) > case.differing * a.numel():
        return False
    a, b = a.where(finite, 0.0), b.where(finite, 0.0)
    largest = float(b.abs().max()) if b.numel() else 0.0
    return bool(((a - b).abs() <= case.close * largest).all())


def nbytes(*tensors: Tensor) -> int:
    """Bytes of all elements."""
    return sum(x.numel() * x.element_size() for x in tensors)


class Draw:
    """Random arguments; the same ones in every run."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def ints(self, low: int, high: int, *shape: int, dtype: torch.dtype = INT32) -> Tensor:
        """Integers in ``[low, high)``."""
        return torch.randint(low, high, shape, generator=self.generator, dtype=dtype)

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Standard normal numbers."""
        return torch.randn(shape, generator=self.generator).to(dtype)

    def uniform(self, *shape: int) -> Tensor:
        """fp32 in ``[0, 1)``."""
        return torch.rand(shape, generator=self.generator)

    def flags(self, *shape: int) -> Tensor:
        """Truth values, half of them true."""
        return self.uniform(*shape) < 0.5

    def distinct(self, high: int, count: int) -> Tensor:
        """Different integers in ``[0, high)``."""
        return torch.randperm(high, generator=self.generator)[:count].to(INT32)


@dataclass(frozen=True)
class Segments:
    """Rows dealt out to requests: up to ``NEXTN + 1`` consecutive ones each.

    Attributes:
        lengths: int32 ``[r]``.
        first: int32 ``[r]``, exclusive sums of the lengths.
        ends: int32 ``[r]``, inclusive sums.
        request: int32 ``[q]`` of every row.
        step: int32 ``[q]``, place of every row in its request.
    """

    lengths: Tensor
    first: Tensor
    ends: Tensor
    request: Tensor
    step: Tensor

    @property
    def count(self) -> int:
        """Requests."""
        return self.lengths.shape[0]


def segments(rows: int) -> Segments:
    """Requests of ``NEXTN + 1`` rows; a last one has what is left."""
    each = NEXTN + 1
    lengths = [each] * (rows // each) + ([rows % each] if rows % each else [])
    length = torch.tensor(lengths, dtype=INT32)
    ends = length.cumsum(0).to(INT32)
    request = torch.repeat_interleave(torch.arange(len(lengths), dtype=INT32), length)
    step = torch.cat([torch.arange(n, dtype=INT32) for n in lengths])
    return Segments(length, ends - length, ends, request, step)


def prefix(lengths: Tensor) -> Tensor:
    """int32 prefix sums with a leading zero."""
    return torch.cat((lengths.new_zeros(1), lengths.cumsum(0))).to(INT32)


def quantized(values: Tensor) -> tuple[Tensor, Tensor]:
    """e4m3 codes and exponent bytes of groups of channels, written plainly."""
    groups = values.to(torch.float32).unflatten(-1, (-1, GROUP))
    wanted = groups.abs().amax(-1).clamp(min=1e-4) / 448.0
    mantissa, exponent = torch.frexp(wanted)
    exponent = exponent - (mantissa == 0.5).to(INT32)
    codes = (groups * torch.exp2(-exponent.to(torch.float32))[..., None]).clamp(-448.0, 448.0)
    codes = codes.to(torch.float8_e4m3fn).view(torch.uint8).flatten(-2)
    return codes, (exponent + 127).to(torch.uint8)
