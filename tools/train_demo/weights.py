"""Trainable weights: what they are called, how they start, and their released number formats.

Matrices that read the same input are kept side by side (``attn.wqkv_a``, the gate and up halves of
the experts ``w13``, all experts of a layer), so that a step does few large products. Names are
otherwise those of the checkpoint.
"""

from __future__ import annotations

import enum
import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer_neuron.checkpoint.config import ModelConfig
from deepinfer_neuron.checkpoint.names import inventory
from tools.train_demo import kernels
from tools.train_demo.functions import quantized

BLOCK = 32


class Kind(enum.Enum):
    """Storage of a weight in the released format."""

    FP8 = "fp8"
    FP4 = "fp4"
    TABLE = "table"
    """e4m3 rows; quantized when they are read."""
    BF16 = "bf16"
    BF16_VECTOR = "bf16_vector"
    """Norm weights and the like: bf16 values, used in fp32."""
    F32_MATRIX = "f32_matrix"
    """fp32 on disk, bf16 values while the model trains with its roundings."""
    F32 = "f32"


@dataclass(frozen=True)
class Slot:
    """One trainable tensor."""

    name: str
    shape: tuple[int, ...]
    kind: Kind


def fused_name(name: str) -> str:
    """The trainable tensor that holds a checkpoint tensor (without ``.weight``/``.scale``)."""
    name = re.sub(r"attn\.(wq_a|wkv)$", "attn.wqkv_a", name)
    name = re.sub(r"experts\.\d+\.w[13]$", "experts.w13", name)
    name = re.sub(r"experts\.\d+\.w2$", "experts.w2", name)
    return re.sub(r"shared_experts\.w[13]$", "shared_experts.w13", name)


@dataclass(frozen=True)
class Part:
    """Where a checkpoint tensor lies in its trainable tensor."""

    stored: str
    """Name on disk, without ``.weight`` for scaled matrices."""
    slot: str
    expert: int | None
    rows: tuple[int, int]


def plan(config: ModelConfig) -> tuple[list[Slot], list[Part]]:
    """Trainable tensors of a configuration, and the checkpoint tensors inside them.

    The image tower and the selection bias of image tokens are not trained and not listed.
    """
    slots: dict[str, Slot] = {}
    parts: list[Part] = []
    specs = {spec.name: spec for spec in inventory(config)}
    for name, spec in specs.items():
        if name.endswith(".scale") or _untrained(name):
            continue
        scaled = name.removesuffix(".weight") + ".scale" in specs
        stored = name.removesuffix(".weight") if scaled else name
        shape = spec.shape
        if spec.dtype == "I8":
            shape = (shape[0], shape[1] * 2)
        target = fused_name(stored)
        expert = re.search(r"experts\.(\d+)\.", stored)
        index = int(expert.group(1)) if expert else None
        kind = _kind(name, spec.dtype, shape)
        known = slots.get(target)
        start = 0
        if known is not None and index in (None, 0):
            start = known.shape[-2]
            shape = (start + shape[0], *shape[1:])
        elif index is not None and index > 0:
            start = shape[0] if stored.endswith("w3") else 0
        parts.append(Part(stored, target, index, (start, start + spec.shape[0])))
        if index is None:
            slots[target] = Slot(target, shape, kind)
        elif index == 0:
            slots[target] = Slot(target, (1, *shape[-2:]), kind)
        else:
            assert known is not None
            slots[target] = Slot(target, (index + 1, *known.shape[1:]), kind)
    return list(slots.values()), parts


def _untrained(name: str) -> bool:
    prefixes = ("vision.", "aligner.", "image_")
    return name.startswith(prefixes) or name.endswith("gate.bias_vl")


def _kind(name: str, dtype: str, shape: tuple[int, ...]) -> Kind:
    if dtype == "F8_E4M3":
        return Kind.TABLE if name.endswith("engram.embed.weight") else Kind.FP8
    if dtype == "I8":
        return Kind.FP4
    if dtype == "F32":
        return Kind.F32_MATRIX if len(shape) == 2 else Kind.F32
    vector = len(shape) == 1 or name.endswith(("engram.q_weight", "engram.k_weight"))
    return Kind.BF16_VECTOR if vector else Kind.BF16


def start(config: ModelConfig, slots: Iterable[Slot], seed: int) -> dict[str, Tensor]:
    """Untrained fp32 weights, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    return {slot.name: _start(config, slot, generator) for slot in slots}


def _start(config: ModelConfig, slot: Slot, generator: torch.Generator) -> Tensor:
    noise = torch.randn(slot.shape, generator=generator)
    name = slot.name
    if name.endswith("norm.weight") or "engram.q_weight" in name or "engram.k_weight" in name:
        return torch.ones(slot.shape)
    if name.endswith(("attn_sink", "gate.bias")):
        return torch.zeros(slot.shape)
    if re.search(r"hc_(attn|ffn)_base", name):
        return hyper_base(config.hc_mult) + 0.05 * noise
    if re.search(r"hc_(attn|ffn)_scale", name):
        return torch.full(slot.shape, 0.1)
    if name == "embed.weight":
        return 0.5 * noise
    if slot.kind is Kind.TABLE or "markov_head.embed" in name:
        return 0.3 * noise
    gain = 1.0
    if name.endswith(("wo_b", "w2", "weights_proj.weight", "head.weight", "engram.wkv")):
        gain = 0.3
    if "markov_head.head" in name or "confidence" in name:
        gain = 0.0
    return noise * (gain / math.sqrt(slot.shape[-1]))


def hyper_base(streams: int) -> Tensor:
    """Bases of a mixer that averages the streams, writes to all and keeps each to itself."""
    pre = torch.full((streams,), math.log(1 / (streams - 1)))
    comb = 3.0 * torch.eye(streams) - 1.0
    return torch.cat((pre, torch.zeros(streams), comb.flatten()))


def fp8_scale(weight: Tensor) -> Tensor:
    """Power-of-two scales ``[..., ceil(N/32), ceil(K/32)]`` of a matrix ``[..., N, K]``."""
    rows, columns = weight.shape[-2:]
    pad = (0, -columns % BLOCK, 0, -rows % BLOCK)
    padded = torch.nn.functional.pad(weight, pad)
    blocks = padded.unflatten(-1, (-1, BLOCK)).unflatten(-3, (-1, BLOCK))
    amax = blocks.abs().amax((-1, -3)).clamp(min=1e-4)
    return torch.exp2(torch.ceil(torch.log2(amax / 448.0)))


def expand(scale: Tensor, rows: int, columns: int) -> Tensor:
    """Block scales repeated to ``[..., rows, columns]``."""
    tall = scale.repeat_interleave(BLOCK, -2)[..., :rows, :]
    return tall.repeat_interleave(BLOCK, -1)[..., :columns]


def released_values(weight: Tensor, kind: Kind) -> Tensor:
    """What the released format keeps of fp32 weights."""
    if kind is Kind.FP8:
        scale = expand(fp8_scale(weight), *weight.shape[-2:])
        return (weight / scale).to(torch.float8_e4m3fn).to(torch.float32) * scale
    if kind is Kind.FP4:
        return quantized(weight, kernels.INDEX_OPERAND)
    if kind in (Kind.F32, Kind.TABLE):
        return weight
    return weight.to(torch.bfloat16).to(torch.float32)


@dataclass(frozen=True)
class Precision:
    """How a forward pass computes.

    ``dtype`` of matrices and activations; ``weights`` and ``activations``: whether they pass the
    released quantizers. ``Precision(torch.float32, False, False)`` has no rounding points at all.
    """

    dtype: torch.dtype = torch.bfloat16
    weights: bool = True
    activations: bool = True


EXACT = Precision(torch.float32, False, False)
PLAIN = Precision(torch.bfloat16, False, False)
RELEASED = Precision(torch.bfloat16, True, True)


def working_copy(
    masters: dict[str, Tensor],
    kinds: dict[str, Kind],
    precision: Precision,
    trained: Callable[[str], bool],
) -> dict[str, Tensor]:
    """The weights a step computes with; those that are trained collect gradients."""
    work = {}
    for name, master in masters.items():
        kind = kinds[name]
        value = master
        if precision.weights:
            value = released_values(master, kind)
        elif precision.dtype is torch.bfloat16 and kind is Kind.BF16_VECTOR:
            value = master.to(torch.bfloat16).to(torch.float32)
        if kind in (Kind.FP8, Kind.FP4, Kind.BF16, Kind.F32_MATRIX, Kind.TABLE):
            value = value.to(precision.dtype)
        value = value.clone() if value is master else value
        work[name] = value.requires_grad_(trained(name))
    return work
