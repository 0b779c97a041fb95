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

    first_residual_shift: int = 0
    """Powers of two taken from what attention and experts add to the trunk (wo_b and every w2) in
    the first block of a stack, whose input is the embedding itself."""
    residual_shift: int = 0
    """The same for the other blocks."""
    quiet_shift: int = 0
    """If not 0, what the other blocks add goes to 32 loud channels, which move on by 32 with every
    site and are raised until the sum of squares over all channels is about the same (by whole
    powers of two, rounded down). The rest is this many powers of two below the loud channels."""
    query_shift: int = 0
    """Powers of two added to the attention queries (wq_b), and so to the attention logits."""
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
    """Their standard deviation."""
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

CALM = Recipe(
    residual_shift=6,
    quiet_shift=7,
    query_shift=1,
    sink_mean=3.0,
    engram_value_shift=1,
    hc_scale=(0.25, 1.0),
    hc_pre_base=1.5,
    hc_comb_base=1.3,
    hc_base_noise=0.8,
    gate_bias_std=0.03,
    head_gain=3.0,
)
"""Another order of summation hardly moves the logits, yet every part of the network does.

The first block is strong, because its input carries no noise yet; so is the Engram memory, whose
values pass no quantizer. The later blocks add about 1 % each: rounding the trunk to bfloat16 turns
the smallest difference into a whole step now and then, so the noise grows with the square root of
what they add, and less if few channels receive it.

Measured on random tokens, fp64 against fp32 accumulation (logits of the median row, same argmax):
nano up to 0.25 % at 150 tokens and 0.32 % at 600; tiny 0.03-0.16 % at 16, 0.19-0.31 % at 150 and
0.26-0.36 % at 600; mid 0.24 % at 24 and 0.23 % at 200; argmax 99.2-100 %. Zeroing one output of a
later layer moves the logits by 0.3-1.2 % (attention) and 0.5-1.5 % (experts), of the first layer by
35-76 %, one Engram layer by 13-21 %.
"""


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
        shifts = self._row_shifts(spec, generic)
        for shift in (int(shifts.min()), int(shifts.max())):
            scale_mix(spec.name, mean_square, shift)
        mix = scale_mix(spec.name, mean_square)
        plain = _in_chunks(
            lambda size: mix.draw(stream, size), math.prod(spec.shape), CODES_PER_CHUNK
        )
        return _lower_rows(plain, spec.shape, shifts) if shifts.any() else plain

    def _row_shifts(self, spec: TensorSpec, generic: str) -> NDArray[np.int64]:
        """Powers of two taken from each row of a scale tensor (negative: added); ``[rows]``.

        A single value stands for all rows.
        """
        recipe = self._recipe
        if generic == "attn.wq_b.scale":
            return np.array([-recipe.query_shift])
        if generic == "engram.wkv.scale":
            # One key block per stream, then the value block.
            keys = self._config.hc_mult * self._config.hidden_size // _BLOCK
            return np.where(np.arange(spec.shape[0]) < keys, 0, recipe.engram_value_shift)
        if generic not in _RESIDUAL_OUTPUTS:
            return np.array([0])
        if spec.name.startswith(("layers.0.", "mtp.0.")):
            return np.array([recipe.first_residual_shift])
        if recipe.quiet_shift == 0:
            return np.array([recipe.residual_shift])
        blocks = self._config.hidden_size // _BLOCK
        block = np.arange(spec.shape[0]) * blocks // spec.shape[0]
        site = 2 * self._depth(spec.name) + generic.startswith("ffn.")
        loud = recipe.residual_shift - int(math.log2(blocks) / 2)
        return np.where(block == site % blocks, loud, loud + recipe.quiet_shift)

    def _depth(self, name: str) -> int:
        """Number of a tensor's block; draft blocks continue the count behind the backbone."""
        stack, number = name.split(".")[:2]
        return int(number) + (self._config.num_hidden_layers if stack == "mtp" else 0)

    def _hc_base(self, name: str, stream: Stream) -> Bytes:
        """Bases of one mixer: 4 read logits, 4 write logits (0), 4 x 4 mixing logits.

        A block mainly reads the stream given by its number modulo the number of streams.
        """
        streams = self._config.hc_mult
        pre = np.full(streams, -self._recipe.hc_pre_base)
        pre[self._depth(name) % streams] = self._recipe.hc_pre_base
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


def _lower_rows(
    plain: Iterator[Bytes], shape: tuple[int, ...], shifts: NDArray[np.int64]
) -> Iterator[Bytes]:
    """Scale bytes with ``shifts`` taken from their rows."""
    table = np.frombuffer(b"".join(part.tobytes() for part in plain), np.uint8).reshape(shape)
    yield (table - shifts[:, None]).astype(np.uint8).reshape(-1)


def _normals(spec: TensorSpec, rule: Normal, stream: Stream) -> Iterator[Bytes]:
    """Bytes of a BF16 or F32 tensor filled by ``rule``."""
    deviation = rule.gain / math.sqrt(spec.shape[-1]) if rule.per_input else rule.gain

    def draw(count: int) -> Bytes:
        values = rule.mean + deviation * stream.normal(count)
        return to_bfloat16(values) if spec.dtype == "BF16" else values.astype("<f4").view(np.uint8)

    return _in_chunks(draw, math.prod(spec.shape), NORMALS_PER_CHUNK)
