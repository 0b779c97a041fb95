"""Synthetic weights: one random stream per tensor, in small chunks, the same on every machine.

A tensor's stream is keyed by the seed and the tensor's name, so its bytes depend neither on the
order of writing nor on other tensors. Only raw generator words, integer arithmetic and single IEEE
operations (add, multiply, divide, square root) are used, hence no difference between platforms or
library versions. The chunk sizes below are part of the recipe: changing them changes the bytes.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from deepinfer_neuron.checkpoint.config import ModelConfig
from deepinfer_neuron.checkpoint.names import TensorSpec, inventory
from deepinfer_neuron.errors import CheckpointError, ConfigError

Bytes = NDArray[np.uint8]

CODES_PER_CHUNK = 1 << 22
NORMALS_PER_CHUNK = 1 << 18

_BLOCK = 32
_SCALE_BIAS = 127
# With scale bytes in this range every code times its scale is zero or a normal bfloat16.
_SCALE_BYTES = range(10, 247)

_E4M3_MAGNITUDES = [
    math.ldexp(code & 7, -9) if code < 8 else math.ldexp(8 + (code & 7), (code >> 3) - 10)
    for code in range(127)
]
E4M3_MEAN_SQUARE = sum(value * value for value in _E4M3_MAGNITUDES) / 127
"""Mean square of a uniformly drawn finite e4m3 code: the standard deviation is 100.06."""
E2M1_MEAN_SQUARE = sum(value * value for value in (0, 0.5, 1, 1.5, 2, 3, 4, 6)) / 8
"""Mean square of a uniformly drawn e2m1 code: the standard deviation is 2.926."""


@dataclass(frozen=True)
class Recipe:
    """How strong each part of a synthetic network is.

    A "gain" multiplies the standard deviation that keeps a unit-variance signal at unit variance,
    which is the inverse square root of a matrix's input width.
    """

    residual_shift: int = 0
    """Powers of two taken from what attention and experts add to the trunk (wo_b and every w2)."""
    first_residual_shift: int = 0
    """The same for the first block of a stack, whose input is the embedding itself."""
    query_gain_shift: int = 0
    """Powers of two added to the attention queries (wq_b), that is, to the attention logits."""
    engram_value_shift: int = 0
    """Powers of two taken from the value rows of the Engram projection."""
    norm_spread: float = 0.15
    """Standard deviation of norm weights around 1."""
    hc_scale: tuple[float, float] = (0.01, 1.0)
    """Range of the three hyper-connection scales; small ones are more frequent."""
    hc_pre_base: float = 3.0
    """Logit of the stream that a layer reads most; the other streams get its negative."""
    hc_comb_base: float = 3.0
    """Logit of a stream mixing into itself; mixing into another stream gets its negative."""
    hc_base_noise: float = 0.1
    """Standard deviation added to every hyper-connection base."""
    gate_gain: float = 1.0
    """Gain of the router."""
    gate_bias_std: float = 0.1
    """Standard deviation of the two selection biases of the router."""
    sink_mean: float = 0.0
    """Mean of the attention sinks, which are logits."""
    sink_std: float = 1.0
    """Standard deviation of the attention sinks."""
    bias_std: float = 0.1
    """Standard deviation of the biases of image tower and aligner."""
    index_weight_gain: float = 1.0
    """Gain of the indexer's head weights."""
    engram_gate_gain: float = 1.0
    """Mean of the Engram query weights, which scales the logit of the Engram gate."""
    head_gain: float = 1.0
    """Gain of the output head: the standard deviation of the logits over the vocabulary."""
    markov_gain: float = 0.5
    """Gain of the Markov head of the drafts."""
    confidence_gain: float = 1.0
    """Gain of the confidence head of the drafts."""


WILD = Recipe()
"""Unit-variance residual branches: amplifies rounding differences from layer to layer."""

CALM = Recipe(residual_shift=5, engram_value_shift=5, hc_pre_base=1.5, hc_comb_base=1.5)
"""Weak residual branches, so that another order of summation hardly moves the logits."""


class Stream:
    """Portable random numbers of one tensor."""

    def __init__(self, seed: int, name: str) -> None:
        digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=16).digest()
        self._generator = np.random.Philox(key=int.from_bytes(digest, "little"))

    def words(self, count: int) -> NDArray[np.uint64]:
        """``count`` raw 64-bit words in little-endian memory order."""
        return self._generator.random_raw(count).astype("<u8", copy=False)

    def uint16(self, count: int) -> NDArray[np.uint16]:
        """``count`` uniform 16-bit integers."""
        return self.words(-(-count // 4)).view("<u2")[:count]

    def bytes(self, count: int) -> Bytes:
        """``count`` uniform bytes."""
        return self.words(-(-count // 8)).view(np.uint8)[:count]

    def e4m3(self, count: int) -> Bytes:
        """``count`` e4m3 codes, uniform over the 254 finite ones."""
        codes = self.bytes(count)
        holes = np.flatnonzero((codes & 0x7F) == 0x7F)
        drawn = (self.uint16(len(holes)).astype(np.uint32) * 254) >> 16
        codes[holes] = (drawn + (drawn >= 127)).astype(np.uint8)
        return codes

    def normal(self, count: int) -> NDArray[np.float64]:
        """``count`` values of mean 0 and variance 1, close to normal: sums of 8 uniform integers.

        The sum is exact, the division rounds once; magnitudes end at 4.9.
        """
        parts = self.words(2 * count).view("<u2").reshape(8, count)
        total: NDArray[np.float64] = parts.sum(axis=0, dtype=np.int64).astype(np.float64)
        return (total - 4 * 65535) / math.sqrt(8 * (65536.0**2 - 1) / 12)


@dataclass(frozen=True)
class ScaleMix:
    """Scale bytes of a matrix: mostly ``center``, sometimes one less, sometimes one more."""

    center: int
    below: int
    """Of 65,536 draws, how many give ``center - 1``."""
    above: int
    """Of 65,536 draws, how many give ``center + 1``."""

    def draw(self, stream: Stream, count: int) -> Bytes:
        """``count`` scale bytes."""
        ticket = stream.uint16(count)
        shift = (ticket >= 65536 - self.above).astype(np.int16) - (ticket < self.below)
        return (shift + self.center).astype(np.uint8)


def scale_mix(name: str, mean_square: float, shift: int = 0) -> ScaleMix:
    """Scale bytes whose squared value has the given mean, then lowered by ``shift`` powers of two.

    The mean is written as ``ratio * 4**exponent`` with ``ratio`` in [0.5, 2). A share ``above`` of
    the bytes gets ``exponent + 1`` (4 times the square), a share ``below`` gets ``exponent - 1``
    (a quarter), so ``1 + 3 * above - 0.75 * below = ratio``. The linear choice of ``above`` keeps
    all three shares positive over the whole range.

    Raises:
        ConfigError: the bytes leave the range in which dequantized values are normal bfloat16.
    """
    mantissa, power = math.frexp(mean_square)
    exponent, odd = divmod(power, 2)
    ratio = mantissa * 2 if odd else mantissa
    above = 0.0625 + 0.2 * (ratio - 0.5)
    below = (1.0 + 3.0 * above - ratio) / 0.75
    center = _SCALE_BIAS + exponent - shift
    if center - 1 not in _SCALE_BYTES or center + 1 not in _SCALE_BYTES:
        raise ConfigError(
            f"the recipe asks for scale bytes around {center} in {name}; allowed are "
            f"{_SCALE_BYTES[0]} to {_SCALE_BYTES[-1]}, so choose a smaller shift."
        )
    return ScaleMix(center, int(below * 65536), int(above * 65536))


def to_bfloat16(values: NDArray[np.float64]) -> Bytes:
    """Bytes of ``values`` rounded to fp32 and then, to nearest even, to bfloat16."""
    bits: NDArray[np.uint32] = values.astype("<f4").view("<u4")
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return rounded.astype("<u2").view(np.uint8)


@dataclass(frozen=True)
class Normal:
    """Independent values around ``mean``; with ``per_input`` the deviation is gain / sqrt(K)."""

    mean: float
    gain: float
    per_input: bool = False


def _normal_rules(recipe: Recipe) -> dict[str, Normal]:
    """Rules of the BF16 and F32 tensors by generic name, without the hyper-connection bases."""
    around_one = Normal(1.0, recipe.norm_spread)
    unit = Normal(0.0, 1.0)
    matrix = Normal(0.0, 1.0, per_input=True)
    bias = Normal(0.0, recipe.bias_std)
    gate_bias = Normal(0.0, recipe.gate_bias_std)
    gain = recipe.engram_gate_gain
    groups = {
        around_one: (
            "norm attn_norm ffn_norm attn.q_norm attn.kv_norm attn.compressor.norm main_norm"
            " attn.indexer.k_norm vision.blocks.*.norm1 vision.blocks.*.norm2 vision.norm"
        ),
        unit: "embed markov_head.embed",
        matrix: (
            "attn.compressor.wkv attn.compressor.wgate attn.indexer.wk vision.patch_embed.proj"
            " vision.blocks.*.attn.wqkv vision.blocks.*.attn.wo vision.blocks.*.mlp.w1"
            " vision.blocks.*.mlp.w2 aligner.w1 aligner.w2"
        ),
    }
    biased = (
        "vision.patch_embed.proj vision.blocks.*.attn.wqkv vision.blocks.*.attn.wo"
        " aligner.w1 aligner.w2"
    )
    return {
        **{f"{stem}.weight": rule for rule, stems in groups.items() for stem in stems.split()},
        **{f"{stem}.bias": bias for stem in biased.split()},
        **dict.fromkeys(("image_start", "image_end", "image_newline"), unit),
        "hc_attn_fn": matrix,
        "hc_ffn_fn": matrix,
        "attn.attn_sink": Normal(recipe.sink_mean, recipe.sink_std),
        "attn.indexer.weights_proj.weight": Normal(0.0, recipe.index_weight_gain, True),
        "ffn.gate.weight": Normal(0.0, recipe.gate_gain, True),
        "ffn.gate.bias": gate_bias,
        "ffn.gate.bias_vl": gate_bias,
        "engram.q_weight": Normal(gain, recipe.norm_spread * gain),
        "engram.k_weight": around_one,
        "head.weight": Normal(0.0, recipe.head_gain, True),
        "markov_head.head.weight": Normal(0.0, recipe.markov_gain, True),
        "confidence_head.proj.weight": Normal(0.0, recipe.confidence_gain, True),
    }


def generic_name(name: str) -> str:
    """A tensor's name without its block prefix, with ``*`` for an expert or image block number."""
    return re.sub(r"\.\d+\.", ".*.", re.sub(r"^(layers|mtp)\.\d+\.", "", name))


_RESIDUAL_OUTPUTS = frozenset(
    {"attn.wo_b.scale", "ffn.shared_experts.w2.scale", "ffn.experts.*.w2.scale"}
)


class WeightWriter:
    """Produces the bytes of every tensor of one configuration, chunk by chunk."""

    def __init__(self, config: ModelConfig, recipe: Recipe, seed: int) -> None:
        self._config = config
        self._recipe = recipe
        self._seed = seed
        self._normal = _normal_rules(recipe)
        self.specs = {spec.name: spec for spec in inventory(config)}
        """Tensors by name, in inventory order."""

    def chunks(self, name: str) -> Iterator[Bytes]:
        """The little-endian bytes of one tensor, in order, at most a few megabytes at a time.

        Raises:
            CheckpointError: no rule covers this tensor.
            ConfigError: the recipe's scales leave the range of usable scale bytes.
        """
        spec = self.specs[name]
        stream = Stream(self._seed, name)
        generic = generic_name(name)
        if spec.dtype == "F8_E4M3":
            return _in_chunks(stream.e4m3, math.prod(spec.shape), CODES_PER_CHUNK)
        if spec.dtype == "I8":
            return _in_chunks(stream.bytes, math.prod(spec.shape), CODES_PER_CHUNK)
        if spec.dtype == "F8_E8M0":
            return self._scales(spec, generic, stream)
        if generic in ("hc_attn_base", "hc_ffn_base"):
            return iter((self._hc_base(name, stream),))
        if generic in ("hc_attn_scale", "hc_ffn_scale"):
            return iter((self._hc_scale(stream),))
        rule = self._normal.get(generic)
        if rule is None:
            raise CheckpointError(
                f"no synthetic weights are defined for tensor {name}; add a rule for {generic}."
            )
        return _normals(spec, rule, stream)

    def _scales(self, spec: TensorSpec, generic: str, stream: Stream) -> Iterator[Bytes]:
        """Scale bytes such that the dequantized matrix has variance 1 / K (a table row: 1).

        The last input block may be partial, so K comes from the codes' tensor.
        """
        weight = self.specs[spec.name.removesuffix("scale") + "weight"]
        packed = weight.dtype == "I8"
        width = weight.shape[1] * (2 if packed else 1)
        variance = 1.0 if generic == "engram.embed.scale" else 1.0 / width
        mean_square = variance / (E2M1_MEAN_SQUARE if packed else E4M3_MEAN_SQUARE)
        shift = self._shift(spec.name, generic)
        count = math.prod(spec.shape)
        mix = scale_mix(spec.name, mean_square, shift)
        plain = _in_chunks(lambda size: mix.draw(stream, size), count, CODES_PER_CHUNK)
        if generic != "engram.wkv.scale":
            return plain
        return self._lower_values(spec, mean_square, b"".join(part.tobytes() for part in plain))

    def _shift(self, name: str, generic: str) -> int:
        """Powers of two that the recipe takes from a matrix (negative: adds)."""
        if generic == "attn.wq_b.scale":
            return -self._recipe.query_gain_shift
        if generic not in _RESIDUAL_OUTPUTS:
            return 0
        if name.startswith(("layers.0.", "mtp.0.")):
            return self._recipe.first_residual_shift
        return self._recipe.residual_shift

    def _lower_values(self, spec: TensorSpec, mean_square: float, scales: bytes) -> Iterator[Bytes]:
        """Lower the scale rows of the value block, which follows one key block per stream."""
        shift = self._recipe.engram_value_shift
        scale_mix(spec.name, mean_square, shift)
        table = np.frombuffer(scales, np.uint8).reshape(spec.shape).copy()
        table[self._config.hc_mult * self._config.hidden_size // _BLOCK :] -= np.uint8(shift)
        yield table.reshape(-1)

    def _hc_base(self, name: str, stream: Stream) -> Bytes:
        """Bases of one mixer: 4 read logits, 4 write logits (0), 4 x 4 mixing logits.

        A layer mainly reads the stream given by its number modulo the number of streams; draft
        blocks continue the count behind the backbone.
        """
        streams = self._config.hc_mult
        stack, number = name.split(".")[:2]
        layer = int(number) + (self._config.num_hidden_layers if stack == "mtp" else 0)
        pre = np.full(streams, -self._recipe.hc_pre_base)
        pre[layer % streams] = self._recipe.hc_pre_base
        comb = (2.0 * np.eye(streams) - 1.0) * self._recipe.hc_comb_base
        base = np.concatenate([pre, np.zeros(streams), comb.reshape(-1)])
        noisy = base + self._recipe.hc_base_noise * stream.normal(len(base))
        return noisy.astype("<f4").view(np.uint8)

    def _hc_scale(self, stream: Stream) -> Bytes:
        """Read, write and mixing scale of one mixer; squaring makes small ones more frequent."""
        low, high = self._recipe.hc_scale
        fraction = stream.uint16(3) / 65535.0
        return (low + (high - low) * (fraction * fraction)).astype("<f4").view(np.uint8)


def _in_chunks(draw: Callable[[int], Bytes], count: int, limit: int) -> Iterator[Bytes]:
    """Call ``draw`` with sizes of at most ``limit`` that add up to ``count``."""
    for start in range(0, count, limit):
        yield draw(min(limit, count - start))


def _normals(spec: TensorSpec, rule: Normal, stream: Stream) -> Iterator[Bytes]:
    """Bytes of a BF16 or F32 tensor filled by ``rule``."""
    deviation = rule.gain / math.sqrt(spec.shape[-1]) if rule.per_input else rule.gain

    def draw(count: int) -> Bytes:
        values = rule.mean + deviation * stream.normal(count)
        return to_bfloat16(values) if spec.dtype == "BF16" else values.astype("<f4").view(np.uint8)

    return _in_chunks(draw, math.prod(spec.shape), NORMALS_PER_CHUNK)
