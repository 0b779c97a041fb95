"""Weight matrices: as stored in the files, or expanded to bf16 once. Both are exact."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from deepinfer_neuron.checkpoint.formats import dequantize_fp4, dequantize_fp8
from deepinfer_neuron.checkpoint.reader import Checkpoint
from deepinfer_neuron.ops.arithmetic import Arithmetic
from deepinfer_neuron.ops.linear import fp4_linear, fp8_linear, linear, linear_fp32


class Linear(nn.Module):
    """``x @ w.T``, rounded to the activation dtype: ``[n, K] -> [n, N]``."""

    arithmetic: Arithmetic
    __call__: Callable[..., Tensor]

    def forward(self, x: Tensor) -> Tensor:
        """Apply the matrix."""
        raise NotImplementedError


class DenseLinear(Linear):
    """A bf16 weight ``[N, K]``."""

    weight: Tensor

    def __init__(self, weight: Tensor, arithmetic: Arithmetic) -> None:
        super().__init__()
        self.arithmetic = arithmetic
        self.register_buffer("weight", weight, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the matrix."""
        return linear(x, self.weight, self.arithmetic)


class WideLinear(Linear):
    """A bf16 or fp32 weight ``[N, K]`` whose product stays fp32."""

    weight: Tensor

    def __init__(self, weight: Tensor, arithmetic: Arithmetic) -> None:
        super().__init__()
        self.arithmetic = arithmetic
        self.register_buffer("weight", weight, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the matrix: fp32 ``[n, N]``."""
        return linear_fp32(x, self.weight, self.arithmetic)


class Fp8Linear(Linear):
    """e4m3 codes ``[N, K]`` with ue8m0 scales of 32 x 32 blocks."""

    codes: Tensor
    scale: Tensor

    def __init__(self, codes: Tensor, scale: Tensor, arithmetic: Arithmetic) -> None:
        super().__init__()
        self.arithmetic = arithmetic
        self.register_buffer("codes", codes, persistent=False)
        self.register_buffer("scale", scale, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the matrix to ``q8`` values."""
        return fp8_linear(x, self.codes, self.scale, self.arithmetic)


@dataclass(frozen=True)
class ExpertMatrix:
    """One matrix of a routed expert, packed (two tensors) or expanded (one)."""

    weight: Tensor
    scale: Tensor | None

    def apply(self, x: Tensor, arithmetic: Arithmetic) -> Tensor:
        """``[n, K]`` q8 values to ``[n, N]``."""
        if self.scale is None:
            return linear(x, self.weight, arithmetic)
        return fp4_linear(x, self.weight, self.scale, arithmetic)


class ExpertBank:
    """The matrices of a layer's routed experts.

    Packed ones are looked up when an expert is first chosen, so experts that are never chosen take
    no memory at all.

    Args:
        name: their common prefix, such as ``layers.3.ffn.experts``.
        count: number of experts.
        source: weights.
    """

    def __init__(self, name: str, count: int, source: WeightSource) -> None:
        self._name = name
        self._source = source
        self._known: dict[int, tuple[ExpertMatrix, ExpertMatrix, ExpertMatrix]] = {}
        if source.expanded is True:
            for expert in range(count):
                self.matrices(expert)

    def matrices(self, expert: int) -> tuple[ExpertMatrix, ExpertMatrix, ExpertMatrix]:
        """Gate, up and down matrix of an expert."""
        if expert not in self._known:
            name, source = f"{self._name}.{expert}", self._source
            self._known[expert] = (
                source.expert(f"{name}.w1"),
                source.expert(f"{name}.w3"),
                source.expert(f"{name}.w2"),
            )
        return self._known[expert]


@dataclass(frozen=True)
class WeightSource:
    """Makes weight modules from a checkpoint.

    Attributes:
        checkpoint: opened files.
        expanded: decode quantized matrices to bf16 now; otherwise they stay memory-mapped. A set
            of names decodes just those, and leaves plain matrices as they are.
        arithmetic: given to every module.
        rank: of the expert-parallel ranks, this process's.
        ranks: between which the routed experts of a static network are divided.
    """

    checkpoint: Checkpoint
    expanded: bool | frozenset[str]
    arithmetic: Arithmetic
    rank: int = 0
    ranks: int = 1

    def held(self, experts: int) -> range:
        """Which of so many routed experts of a block this rank holds."""
        return range(experts * self.rank // self.ranks, experts * (self.rank + 1) // self.ranks)

    def expands(self, name: str) -> bool:
        """Whether the quantized matrix ``name`` is decoded now."""
        return self.expanded if isinstance(self.expanded, bool) else name in self.expanded

    def plain(self, name: str) -> Tensor:
        """A tensor as stored (bf16 or fp32)."""
        return self.checkpoint.tensor(name)

    def fp32(self, name: str) -> Tensor:
        """A small tensor as fp32."""
        return self.checkpoint.tensor(name).to(torch.float32)

    def dense(self, name: str) -> DenseLinear:
        """The bf16 matrix ``name.weight``."""
        return DenseLinear(self.plain(f"{name}.weight"), self.arithmetic)

    def wide(self, name: str) -> WideLinear:
        """The bf16 matrix ``name.weight`` with fp32 results, widened once if expanded."""
        weight = self.plain(f"{name}.weight")
        widened = weight.to(torch.float32) if self.expanded is True else weight
        return WideLinear(widened, self.arithmetic)

    def fp8(self, name: str) -> Linear:
        """The fp8 matrix ``name``."""
        codes, scale = self._packed(name)
        if self.expands(name):
            return DenseLinear(dequantize_fp8(codes, scale), self.arithmetic)
        return Fp8Linear(codes, scale, self.arithmetic)

    def fp8_groups(self, name: str, groups: int) -> nn.ModuleList:
        """The fp8 matrix ``name`` cut into row groups of equal height."""
        codes, scale = self._packed(name)
        if self.expands(name):
            weight = dequantize_fp8(codes, scale)
            return nn.ModuleList(DenseLinear(w, self.arithmetic) for w in weight.chunk(groups))
        parts = zip(codes.chunk(groups), scale.chunk(groups), strict=True)
        return nn.ModuleList(Fp8Linear(c, s, self.arithmetic) for c, s in parts)

    def expert(self, name: str) -> ExpertMatrix:
        """The fp4 matrix ``name``."""
        packed, scale = self._packed(name)
        if self.expands(name):
            return ExpertMatrix(dequantize_fp4(packed, scale), None)
        return ExpertMatrix(packed, scale)

    def _packed(self, name: str) -> tuple[Tensor, Tensor]:
        """Codes and scales; read into memory that is freed again if they are decoded now."""
        get = self.checkpoint.read if self.expands(name) else self.checkpoint.tensor
        return get(f"{name}.weight"), get(f"{name}.scale")
