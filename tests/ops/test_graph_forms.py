"""Graph forms give the bits of the host's bodies."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from deepinfer_neuron.checkpoint import formats
from deepinfer_neuron.errors import ConfigError
from deepinfer_neuron.ops import (
    gather,
    graph_formats,
    graph_math,
    graph_select,
    index,
    moe,
    quant,
    rope,
    sample,
    scale_layout,
)
from deepinfer_neuron.ops.arithmetic import (
    free_arithmetic,
    fused_multiply_add,
    graph_arithmetic,
    square_root,
)
from tests.ops.number_formats import normal, same_bits

CODES = torch.arange(256, dtype=torch.uint8)
ROUNDED = free_arithmetic()
FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)
SCORES = st.sampled_from([-math.inf, -1.0, -0.0, 0.0, 0.5, 2.0, math.inf])

code_scales = pytest.mark.parametrize("scale", [*range(0, 256, 17), 1, 9, 10, 246, 247, 252, 254])


def same(a: Tensor, b: Tensor) -> bool:
    """Whether every bit agrees, except those of what is NaN in both."""
    nan = a.isnan()
    return torch.equal(nan, b.isnan()) and same_bits(a.masked_fill(nan, 0), b.masked_fill(nan, 0))


def fp32(shape: tuple[int, ...], seed: int) -> Tensor:
    """Gaussian numbers."""
    return normal(shape, seed, torch.float32)


def every_bf16() -> Tensor:
    """All finite bf16 numbers, and as many zeros as fill rows of 32."""
    numbers = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    finite = numbers.where(numbers.isfinite(), 0.0)
    assert finite.numel() % 32 == 0
    return finite


def fp32_grid() -> Tensor:
    """fp32 numbers of all exponents around every mantissa that an encoder can round at."""
    top = torch.arange(1 << 14, dtype=torch.int64) << 18
    bits = (top[:, None] + torch.tensor([0, 1, 2, (1 << 18) - 1])).flatten().to(torch.int32)
    numbers = bits.view(torch.float32)
    return numbers.where(numbers.isfinite(), 0.0)


def adversarial_rows(width: int = 64) -> Tensor:
    """Rows that stress a quantizer's scale: extremes, powers of two and their neighbours."""
    rows = [torch.zeros(width), -torch.zeros(width), torch.full((width,), 3.3895e38)]
    rows += [torch.full((width,), 1e-40), torch.full((width,), -(2.0**-126))]
    for edge in (448.0, 6.0, 1e-4, 6.0 * 2.0**-9, 6.0 * 2.0**-126, 1.75, 1.0):
        for power in (-20, 0, 13):
            middle = torch.tensor(edge * 2.0**power)
            for number in (
                middle,
                middle.nextafter(torch.tensor(0.0)),
                middle.nextafter(3 * middle),
            ):
                ramp = torch.linspace(-1.0, 1.0, width) * number
                ramp[0] = number
                rows.append(ramp)
    spread = fp32((64, width), 5) * 2.0 ** torch.arange(-130, 126, 4)[:, None].float()
    return torch.cat((torch.stack(rows), spread.where(spread.isfinite(), 1.0)))


class TestCodes:
    """Single numbers, all of them where possible."""

    def test_decoders_read_every_code(self) -> None:
        assert same(graph_formats.decode_e4m3(CODES), formats.decode_e4m3(CODES))
        assert same(graph_formats.decode_e2m1(CODES), formats.decode_e2m1(CODES))
        powers = formats.decode_ue8m0(CODES).to(torch.bfloat16)
        assert same(graph_formats.decode_ue8m0(CODES), powers)

    @pytest.mark.parametrize("numbers", [every_bf16(), fp32_grid()], ids=["bf16", "fp32"])
    def test_encoders_round_alike(self, numbers: Tensor) -> None:
        for name in ("encode_e4m3", "encode_e2m1"):
            ours, host = getattr(graph_formats, name), getattr(formats, name)
            assert torch.equal(ours(numbers), host(numbers))

    def test_encoders_undo_decoders(self) -> None:
        finite = CODES[(CODES & 0x7F) != 0x7F]
        assert torch.equal(graph_formats.encode_e4m3(graph_formats.decode_e4m3(finite)), finite)
        assert torch.equal(graph_formats.encode_e2m1(graph_formats.decode_e2m1(CODES)), CODES)

    def test_pairs_of_exponents_pack_alike(self) -> None:
        pairs = torch.cartesian_prod(CODES, CODES)
        for rows in (pairs, pairs.view(-1)[:1001].view(7, 143), CODES[:, None]):
            expected = scale_layout.pack_exponents(rows, torch.int16)
            assert torch.equal(graph_formats.pack_exponent_pairs(rows), expected)


class TestDequantization:
    """All codes at every scale, the scales one by one so that the host picks either of its ways."""

    @code_scales
    def test_rows(self, scale: int) -> None:
        codes = CODES.view(8, 32)
        scales = torch.full((8, 1), scale, dtype=torch.uint8)
        for name in ("dequantize_fp8_rows", "dequantize_fp4"):
            packed = codes if name == "dequantize_fp8_rows" else codes[:, :16].contiguous()
            expected = getattr(formats, name)(packed, scales)
            assert same(getattr(graph_formats, name)(packed, scales), expected)

    def test_all_codes_at_all_scales(self) -> None:
        codes = CODES[:, None].expand(-1, 256).contiguous()
        scales = CODES.expand(256, -1).contiguous()
        for name in ("dequantize_fp8_rows", "dequantize_fp4"):
            host = getattr(formats, name)
            columns = [
                host(codes[:, s : s + 1].contiguous(), scales[:, s : s + 1].contiguous())
                for s in range(256)
            ]
            assert same(getattr(graph_formats, name)(codes, scales), torch.cat(columns, 1))

    @pytest.mark.parametrize("shape", [(64, 96), (33, 70), (1, 1), (32, 31), (5, 64)])
    def test_blocks(self, shape: tuple[int, int]) -> None:
        generator = torch.Generator().manual_seed(shape[0])
        codes = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
        blocks = (-(-shape[0] // 32), -(-shape[1] // 32))
        for largest in (130, 256):
            scale = torch.randint(0, largest, blocks, dtype=torch.uint8, generator=generator)
            expected = formats.dequantize_fp8(codes, scale)
            assert same(graph_formats.dequantize_fp8(codes, scale), expected)

    @pytest.mark.parametrize(
        ("name", "first", "last"), [("dequantize_fp8_rows", 10, 246), ("dequantize_fp4", 2, 252)]
    )
    def test_legal_scales_keep_results_normal(self, name: str, first: int, last: int) -> None:
        decode = graph_formats.decode_e4m3 if "fp8" in name else graph_formats.decode_e2m1
        exact = decode(CODES[(CODES & 0x7F) != 0x7F] if "fp8" in name else CODES).double()
        codes = CODES[(CODES & 0x7F) != 0x7F] if "fp8" in name else CODES
        for scale in (first, 127, last):
            scales = torch.full((codes.numel(), 1), scale, dtype=torch.uint8)
            values = getattr(graph_formats, name)(codes[:, None], scales).flatten().double()
            assert torch.equal(values, exact * 2.0 ** (scale - 127))
            assert bool(((values == 0) | (values.abs() >= 2.0**-126)).all())
        below = torch.full((codes.numel(), 1), first - 1, dtype=torch.uint8)
        small = getattr(graph_formats, name)(codes[:, None], below).double().abs()
        assert bool(((small > 0) & (small < 2.0**-126)).any())
        above = torch.full((codes.numel(), 1), last + 1, dtype=torch.uint8)
        assert bool(getattr(graph_formats, name)(codes[:, None], above).isinf().any())


class TestQuantizers:
    """Codes, scales and values of rows."""

    @staticmethod
    def agree(x: Tensor) -> None:
        assert same(graph_formats.q8(x), quant.q8(x, ROUNDED))
        assert same(graph_formats.q4_index(x), quant.q4_index(x, ROUNDED))
        for name in ("q8", "q4_index", "q4_cache"):
            codes, scale = getattr(graph_formats, f"{name}_codes")(x)
            expected, expected_scale = getattr(quant, f"{name}_codes")(x)
            assert torch.equal(codes, expected)
            assert torch.equal(scale, expected_scale)
            values = getattr(quant, f"{name}_values")(expected, expected_scale)
            assert same(getattr(graph_formats, f"{name}_values")(codes, scale), values)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_random_and_adversarial_rows(self, dtype: torch.dtype) -> None:
        self.agree(fp32((2, 50, 96), 1).to(dtype))
        self.agree(adversarial_rows().to(dtype).clamp(-3.38e38, 3.38e38))

    def test_every_bf16_number(self) -> None:
        self.agree(every_bf16().view(-1, 32))

    @settings(max_examples=60, deadline=None, derandomize=True)
    @given(st.lists(FLOATS, min_size=32, max_size=32))
    def test_any_row(self, row: list[float]) -> None:
        self.agree(torch.tensor([row], dtype=torch.float32))


class TestSelections:
    """Entries, blocks and experts, with ties everywhere."""

    @settings(max_examples=80, deadline=None, derandomize=True)
    @given(st.data())
    def test_entries_and_blocks(self, data: st.DataObject) -> None:
        width = data.draw(st.integers(1, 40))
        rows = data.draw(
            st.lists(
                st.lists(
                    SCORES | st.floats(-60000.0, 60000.0, width=16), min_size=width, max_size=width
                ),
                min_size=1,
                max_size=3,
            )
        )
        scores = torch.tensor(rows, dtype=torch.float32)
        limit = data.draw(st.integers(1, 50))
        size = data.draw(st.integers(1, 9))
        visible = torch.tensor([data.draw(st.integers(0, width)) for _ in rows], dtype=torch.int32)
        self.agree(scores, visible, limit, size)

    @staticmethod
    def agree(scores: Tensor, visible: Tensor, limit: int, size: int) -> None:
        width = scores.shape[1]
        chosen = graph_select.top_entries(scores, limit)
        assert chosen.dtype == torch.int32
        assert torch.equal(chosen.long(), index.top_entries(scores, limit))
        shown = scores.masked_fill(torch.arange(width) >= visible[:, None], -math.inf)
        blocks = graph_select.candidate_blocks(shown, visible, size, limit)
        assert blocks.dtype == torch.int32
        expected = index.candidate_blocks(shown, visible.long(), size, limit)
        assert torch.equal(blocks.long(), expected)
        mask = graph_select.candidate_mask(blocks, size, width)
        assert torch.equal(mask, index.candidate_mask(expected, size, width))
        first = graph_select.first_entries(visible, limit)
        assert first.dtype == torch.int32
        assert torch.equal(first.long(), index.first_entries(visible.long(), limit))

    @pytest.mark.parametrize("limit", [1, 7, 512, 600])
    def test_rows_without_entries_and_rows_of_equals(self, limit: int) -> None:
        scores = torch.zeros(5, 600)
        scores[0] = -math.inf
        scores[1, 5:] = -math.inf
        scores[2, ::3] = -0.0
        scores[3] = fp32((600,), 3)
        scores[4] = math.inf
        self.agree(scores, torch.tensor([0, 5, 600, 599, 1], dtype=torch.int32), limit, 8)

    def test_entries_beyond_the_keys_are_refused(self) -> None:
        scores = torch.zeros(1).expand(1, graph_select.MOST_ENTRIES + 1)
        with pytest.raises(ConfigError, match="fp32 keys"):
            graph_select.top_entries(scores, 4)

    @settings(max_examples=100, deadline=None, derandomize=True)
    @given(st.integers(1, 40), st.integers(0, 1 << 30), st.booleans())
    def test_experts(self, experts: int, seed: int, tied: bool) -> None:
        scores = fp32((3, experts), seed).abs()
        if tied:
            scores = (scores * 2).round()
        for bias in (None, fp32((experts,), seed + 1), torch.zeros(3, experts)):
            count = min(6, experts)
            chosen = graph_select.choose(scores, bias, count)
            expected = moe.choose(scores, bias, count)
            assert chosen.dtype == torch.int32
            assert torch.equal(chosen.long(), expected)
            shares = graph_select.shares(scores, chosen, 2.5)
            assert same(shares, moe.shares(scores, expected, 2.5))

    @settings(max_examples=50, deadline=None, derandomize=True)
    @given(st.lists(SCORES, min_size=1, max_size=40))
    def test_largest_logit(self, row: list[float]) -> None:
        logits = torch.tensor([row, row[::-1]], dtype=torch.float32)
        found = graph_select.argmax(logits)
        assert found.dtype == torch.int32
        assert torch.equal(found.long(), sample.argmax(logits))


GRAPH = graph_arithmetic()


class TestArithmeticAndGathers:
    """Forms that round as the device does, and gathers that are exact."""

    def test_roots_and_products_stay_within_their_roundings(self) -> None:
        a, b, c = (fp32((1000,), seed) for seed in (1, 2, 3))
        root = GRAPH.square_root(a.abs())
        exact = square_root(a.abs())
        assert bool(((root.view(torch.int32) - exact.view(torch.int32)).abs() <= 1).all())
        bound = 2.0**-23 * ((a * b).abs() + c.abs())
        difference = GRAPH.fused(a, b, c) - fused_multiply_add(a, b, c)
        assert bool((difference.abs() <= bound).all())
        turned, expected = graph_math.turn_pairs(a, b, c, c), rope.turn_pairs(a, b, c, c)
        limit = 2.0**-22 * ((a * c).abs() + (b * c).abs())
        for ours, host in zip(turned, expected, strict=True):
            assert bool(((ours - host).abs() <= limit).all())

    def test_bytes_keep_every_pattern(self) -> None:
        table = torch.cat((CODES.view(8, 32), torch.full((1, 32), 0xFF, dtype=torch.uint8)))
        places = torch.tensor([8, 0, -1, 9, 7], dtype=torch.int32)
        words = graph_math.byte_words(table)
        assert words.data_ptr() == table.data_ptr()
        for form in (table, words):
            gathered = graph_math.gather_bytes(form, places)
            assert torch.equal(gathered, gather.gather_rows(table, places.long()))

    @pytest.mark.parametrize(
        ("table", "message"),
        [
            (torch.zeros(4, 6, dtype=torch.uint8), "multiple of 4"),
            (torch.zeros(4, 16, dtype=torch.uint8)[:, ::2], "contiguous"),
            (torch.zeros(33, dtype=torch.uint8)[1:].view(4, 8), "multiple of 4 bytes"),
            (torch.zeros(4, 8, dtype=torch.int8), "bytes was expected"),
        ],
    )
    def test_tables_without_words_are_refused(self, table: Tensor, message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            graph_math.byte_words(table)
