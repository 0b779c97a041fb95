"""Matrix products: one rounding, accumulation, strided outputs, groups, masks, heads, splits."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from torch import Tensor

from deepinfer_neuron.compat.vendor import deep_gemm, knobs, operands
from deepinfer_neuron.errors import ConfigError
from deepinfer_neuron.ops.arithmetic import fixed_arithmetic, free_arithmetic
from deepinfer_neuron.ops.grouped_gemm import CHUNK_BYTES, Operand, expert_rows, gemm
from tests.compat.vendor_plain import WORDS, Quantized, calc_diff, one_rounding, packed_words
from tests.ops.number_formats import (
    e4m3_values,
    nearest_e4m3,
    normal,
    random_bytes,
    same_bits,
    wide,
)

GUARD = 7.0


def _padded(rows: int, columns: int, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor]:
    """A buffer of guard values, and a view of strided rows in its middle."""
    buffer = torch.full((rows + 2, columns + 9), GUARD, dtype=dtype)
    return buffer, buffer[1 : rows + 1, 3 : columns + 3]


def _guarded(buffer: Tensor, view: Tensor) -> bool:
    """Whether everything around ``view`` kept its value."""
    rest = buffer.clone()
    rest[1 : view.shape[0] + 1, 3 : view.shape[1] + 3] = GUARD
    return bool((rest == GUARD).all())


@pytest.fixture
def alignment() -> int:
    return 32


@pytest.fixture(autouse=True)
def _alignment(monkeypatch: pytest.MonkeyPatch, alignment: int) -> None:
    monkeypatch.setattr(knobs.KNOBS, "row_alignment", alignment)


@pytest.mark.parametrize("k", [32, 512, 8192])
@pytest.mark.parametrize("call", [deep_gemm.bf16_gemm_nt, deep_gemm.cublaslt_gemm_nt])
def test_bf16_rounds_once(call, k: int) -> None:
    a, b = normal((5, k), 1), normal((7, k), 2)
    buffer, d = _padded(5, 7)
    call(a, b, d, None)
    exact = wide(a) @ wide(b).T
    assert one_rounding(d, exact, np.abs(wide(a)) @ np.abs(wide(b)).T)
    assert _guarded(buffer, d)
    single = torch.empty(5, 7)
    call(a, b, single)
    assert calc_diff(single, exact) < 1e-12


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("same", [True, False])
def test_accumulator_enters_before_the_rounding(dtype: torch.dtype, same: bool) -> None:
    a, b = normal((4, 64), 3), normal((6, 64), 4)
    c = normal((4, 6), 5).to(dtype) * 100
    exact = wide(c) + wide(a) @ wide(b).T
    buffer, d = _padded(4, 6, dtype)
    if same:
        d.copy_(c)
        deep_gemm.bf16_gemm_nt(a, b, d, d)
    else:
        kept = c.clone()
        deep_gemm.bf16_gemm_nt(a, b, d, c)
        assert torch.equal(c, kept)
    assert one_rounding(d, exact, np.abs(wide(c)) + np.abs(wide(a)) @ np.abs(wide(b)).T)
    assert _guarded(buffer, d)


def test_fp32_operands() -> None:
    a, b = normal((3, 40), 6, torch.float32), normal((5, 40), 7, torch.float32)
    d = torch.empty(3, 5)
    deep_gemm.cublaslt_gemm_nt(a, b, d, None)
    assert calc_diff(d, wide(a) @ wide(b).T) < 1e-12


@pytest.mark.parametrize("word", WORDS)
@pytest.mark.parametrize("fmt", ["e4m3", "e2m1"])
@pytest.mark.parametrize(("m", "k"), [(1, 128), (9, 384), (33, 1024)])
def test_quantized(word: torch.dtype, fmt: str, m: int, k: int) -> None:
    a, b = Quantized((m, k), 8), Quantized((70, k), 9, fmt)
    buffer, d = _padded(m, 70)
    deep_gemm.fp8_fp4_gemm_nt(a.pair(word, True), b.pair(word, True), d, None, recipe=(1, 1, 32))
    exact, terms = a.values @ b.values.T, np.abs(a.values) @ np.abs(b.values).T
    assert one_rounding(d, exact, terms)
    assert _guarded(buffer, d)
    again = torch.empty_like(d)
    deep_gemm.fp8_fp4_gemm_nt(a.pair(word), b.pair(word), again)
    assert same_bits(again, d.contiguous())
    deep_gemm.fp8_fp4_gemm_nt(a.pair(word), b.pair(word), d, d)
    assert one_rounding(d, exact + wide(again), terms + np.abs(wide(again)))


def test_a_group_may_be_cut_by_the_last_column() -> None:
    a, b = normal((3, 80), 10), normal((4, 80), 11)
    codes_a, codes_b = (torch.from_numpy(nearest_e4m3(wide(x))).to(torch.uint8) for x in (a, b))
    scale = packed_words(np.full((4, 3), 128, dtype=np.uint8), torch.int16)
    d = torch.empty(3, 4)
    left, right = (x.view(torch.float8_e4m3fn) for x in (codes_a, codes_b))
    deep_gemm.fp8_fp4_gemm_nt((left, scale[:3]), (right, scale), d)
    exact = 4 * e4m3_values(codes_a.long().numpy()) @ e4m3_values(codes_b.long().numpy()).T
    assert calc_diff(d, exact) < 1e-12


def test_fp4_and_fp8_weights_of_the_same_numbers() -> None:
    a, b = Quantized((6, 256), 12), Quantized((40, 256), 13, "e2m1")
    unpacked = b.values / np.repeat(2.0 ** (b.exponents.astype(np.float64) - 127), 32, -1)
    codes = torch.from_numpy(nearest_e4m3(unpacked)).to(torch.uint8).view(torch.float8_e4m3fn)
    results = []
    for weight in (b.codes, codes):
        d = torch.empty(6, 40, dtype=torch.bfloat16)
        pair = (weight, packed_words(b.exponents, torch.int16))
        deep_gemm.fp8_fp4_gemm_nt(a.pair(torch.int16), pair, d)
        results.append(d)
    assert same_bits(*results)


@pytest.mark.parametrize("order", [fixed_arithmetic(), free_arithmetic()], ids=["fixed", "free"])
@pytest.mark.parametrize("fmt", ["e4m3", "e2m1", "bf16"])
def test_decoding_in_runs_changes_nothing(order, fmt: str) -> None:
    a = Quantized((5, 128), 14)
    if fmt == "bf16":
        weight = Operand(normal((100, 128), 15))
    else:
        weight = Operand(*Quantized((100, 128), 15, fmt).pair(torch.int16))
    whole = weight.values()
    for start, stop in ((0, 32), (32, 33), (64, 100)):
        assert same_bits(weight[start:stop].values(), whole[start:stop])
    results = []
    for chunk in (1, 4 * 128 * 40, CHUNK_BYTES):
        out = torch.empty(5, 100)
        gemm(Operand(*a.pair(torch.int16)), weight, out, None, order, chunk)
        results.append(out)
    plain = order.order.matmul(Operand(*a.pair(torch.int16)).values(), whole)
    if order == fixed_arithmetic():
        assert all(same_bits(out, plain) for out in results)
    else:
        assert all(calc_diff(out, wide(plain)) < 1e-12 for out in results)


def test_runs_stay_below_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    original = Operand.values

    def recorded(self: Operand) -> Tensor:
        values = original(self)
        sizes.append(values.numel() * values.element_size())
        return values

    monkeypatch.setattr(Operand, "values", recorded)
    x, weight = Operand(normal((1, 2048), 16)), Operand(normal((2500, 2048), 17))
    gemm(x, weight, torch.empty(1, 2500), None, free_arithmetic())
    assert len(sizes) == 3
    assert max(sizes) <= CHUNK_BYTES


@pytest.mark.parametrize(("m", "n"), [(0, 4), (3, 0), (0, 0)])
def test_nothing_to_do(m: int, n: int) -> None:
    d = torch.empty(m, n, dtype=torch.bfloat16)
    deep_gemm.bf16_gemm_nt(normal((m, 64), 1), normal((n, 64), 2), d, d)
    a, b = Quantized((m, 64), 3), Quantized((n, 64), 4, "e2m1")
    deep_gemm.fp8_fp4_gemm_nt(a.pair(torch.int16), b.pair(torch.int16), d)


def _groups(counts: list[int], alignment: int) -> tuple[list[slice], Tensor, int]:
    parts, start = [], 0
    for count in counts:
        parts.append(slice(start, start + count))
        start = -(-(start + count) // alignment) * alignment
    return parts, torch.tensor([part.stop for part in parts], dtype=torch.int32), start


COUNTS = [[0, 1, 32, 0, 33, 5], [0, 0, 0], [64, 0], [0, 1]]


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("fmt", ["e4m3", "e2m1"])
@pytest.mark.parametrize("word", WORDS)
def test_grouped_quantized(counts: list[int], fmt: str, word: torch.dtype, alignment: int) -> None:
    parts, psum, rows = _groups(counts, alignment)
    a, b = Quantized((rows, 128), 20), Quantized((len(counts), 48, 128), 21, fmt)
    codes, scale = a.pair(word, columns=True)
    padding = torch.ones(rows, dtype=torch.bool)
    for part in parts:
        padding[part] = False
    codes.view(torch.uint8)[padding] = 0x7F
    buffer, d = _padded(rows, 48)
    deep_gemm.m_grouped_fp8_fp4_gemm_nt_contiguous(
        (codes, scale),
        b.pair(word, columns=True),
        d,
        psum,
        recipe_a=(1, 32),
        recipe_b=(1, 32),
        use_psum_layout=True,
        expected_m_for_psum_layout=4,
    )
    for expert, part in enumerate(parts):
        x, w = a.values[part], b.values[expert]
        assert one_rounding(d[part], x @ w.T, np.abs(x) @ np.abs(w).T)
    assert bool((d[padding] == GUARD).all())
    assert _guarded(buffer, d)


@pytest.mark.parametrize("counts", COUNTS)
def test_grouped_bf16(counts: list[int], alignment: int) -> None:
    parts, psum, rows = _groups(counts, alignment)
    a, b = normal((rows, 96), 22), normal((len(counts), 40, 96), 23)
    expected = [wide(a[part]) @ wide(b[e]).T for e, part in enumerate(parts)]
    for before, after in itertools.pairwise([*parts, slice(rows, rows)]):
        a[before.stop : after.start] = torch.nan
    d = torch.full((rows, 40), GUARD, dtype=torch.bfloat16)
    deep_gemm.m_grouped_bf16_gemm_nt_contiguous(
        a, b, d, psum, use_psum_layout=True, expected_m_for_psum_layout=None
    )
    for part, exact in zip(parts, expected, strict=True):
        assert calc_diff(d[part], exact) < 1e-5
        assert not d[part].isnan().any()


def test_ends_of_empty_experts() -> None:
    ends = torch.tensor([3, 3, 7], dtype=torch.int32)
    assert expert_rows(ends, 4, 8) == [slice(0, 3), slice(4, 4), slice(4, 7)]
    for wrong in ([5, 3], [3, 9]):
        with pytest.raises(ConfigError, match="ascending"):
            expert_rows(torch.tensor(wrong), 4, 8)


@pytest.mark.parametrize("fmt", ["e4m3", "e2m1", "bf16"])
def test_masked(fmt: str) -> None:
    counts = torch.tensor([3, 0, 5, 1], dtype=torch.int32)
    d = torch.full((4, 5, 24), GUARD, dtype=torch.bfloat16)
    if fmt == "bf16":
        a, b = normal((4, 5, 64), 24), normal((4, 24, 64), 25)
        left, right = wide(a), wide(b)
        deep_gemm.m_grouped_bf16_gemm_nt_masked(a, b, d, counts, 4)
    else:
        x, w = Quantized((4, 5, 64), 24), Quantized((4, 24, 64), 25, fmt)
        left, right = x.values, w.values
        deep_gemm.m_grouped_fp8_fp4_gemm_nt_masked(
            x.pair(torch.int16, True), w.pair(torch.int16, True), d, counts, 4
        )
    for expert, count in enumerate(counts.tolist()):
        exact = left[expert, :count] @ right[expert].T
        assert calc_diff(d[expert, :count], exact) < 1e-5
        assert bool((d[expert, count:] == GUARD).all())


@pytest.mark.parametrize("word", WORDS)
@pytest.mark.parametrize("batch", [0, 1, 5])
def test_einsum(word: torch.dtype, batch: int) -> None:
    x, w = Quantized((batch, 3, 128), 26), Quantized((3, 64, 128), 27)
    flat = packed_words(x.exponents.reshape(batch, 12), word)
    scale = flat.view(batch, 3, 4 // word.itemsize)
    out = torch.full((batch, 3, 64), GUARD, dtype=torch.bfloat16)
    deep_gemm.fp8_einsum(
        "bhr,hdr->bhd", (x.codes, scale), w.pair(word, True), out, recipe=(1, 1, 32)
    )
    exact = np.einsum("bhr,hdr->bhd", x.values, w.values)
    assert one_rounding(out, exact, np.einsum("bhr,hdr->bhd", abs(x.values), abs(w.values)))


@pytest.mark.parametrize("word", WORDS)
def test_einsum_with_quantized_result(word: torch.dtype) -> None:
    x, w = Quantized((4, 2, 64), 28), Quantized((2, 64, 64), 29)
    single = torch.empty(4, 2, 64)
    deep_gemm.fp8_einsum("bhr,hdr->bhd", x.pair(word), w.pair(word), single)
    codes = torch.zeros(4, 2, 64, dtype=torch.float8_e4m3fn)
    words = 4 // word.itemsize
    scale = torch.zeros(words, 8, dtype=word).T[:4]
    deep_gemm.fp8_einsum("bhr,hdr->bhd", x.pair(word), w.pair(word), (codes, scale))
    exponents = scale.clone(memory_format=torch.contiguous_format).view(torch.uint8).view(4, 4)
    groups = wide(single).reshape(4, 4, 32)
    for row, group in itertools.product(range(4), range(4)):
        values = groups[row, group]
        exponent = 127
        while np.abs(values).max() > 448.0 * 2.0 ** (exponent - 127):
            exponent += 1
        while np.abs(values).max() <= 448.0 * 2.0 ** (exponent - 128):
            exponent -= 1
        assert int(exponents[row, group]) == exponent
        expected = nearest_e4m3(values / 2.0 ** (exponent - 127))
        actual = codes.view(torch.uint8).view(4, 4, 32)[row, group]
        assert np.array_equal(actual.numpy(), expected)


@pytest.mark.parametrize("splits", [None, 1, 3, 16])
@pytest.mark.parametrize("rows", [0, 1, 9])
def test_hyper_connection_projection(splits: int | None, rows: int) -> None:
    x, fn = normal((rows, 256), 30), normal((24, 256), 31, torch.float32)
    lead = () if splits in (None, 1) else (splits,)
    d, squares = torch.empty(*lead, rows, 24), torch.empty(*lead, rows)
    deep_gemm.tf32_hc_prenorm_gemm(x, fn, d, squares, *([] if splits is None else [splits]))
    total = d.sum(0) if lead else d
    assert calc_diff(total, wide(x) @ wide(fn).T) < 1e-12
    assert calc_diff(squares.sum(0) if lead else squares, (wide(x) ** 2).sum(1)) < 1e-12
    if lead:
        part = wide(x)[:, : -(-256 // splits)]
        assert calc_diff(squares[0], (part**2).sum(1)) < 1e-12


def test_repeats_bit_for_bit() -> None:
    a, b = Quantized((8, 512), 32), Quantized((64, 512), 33, "e2m1")
    results = []
    for _ in range(3):
        d = torch.empty(8, 64, dtype=torch.bfloat16)
        deep_gemm.fp8_fp4_gemm_nt(a.pair(torch.int16), b.pair(torch.int16), d)
        results.append(d)
    assert same_bits(results[0], results[1])
    assert same_bits(results[0], results[2])


def test_rows_do_not_depend_on_their_neighbours_if_the_environment_asks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("DEEPINFER_BATCH_INVARIANT", "1")
    operands.arithmetic.cache_clear()
    try:
        a, b = Quantized((9, 512), 34), Quantized((65, 512), 35, "e2m1")
        codes, scale = a.pair(torch.int16)
        d = torch.empty(9, 65, dtype=torch.bfloat16)
        deep_gemm.fp8_fp4_gemm_nt((codes, scale), b.pair(torch.int16), d)
        for row in range(9):
            alone = torch.empty(1, 65, dtype=torch.bfloat16)
            part = slice(row, row + 1)
            deep_gemm.fp8_fp4_gemm_nt((codes[part], scale[part]), b.pair(torch.int16), alone)
            assert same_bits(alone, d[part])
    finally:
        operands.arithmetic.cache_clear()


def test_bad_input_is_named() -> None:
    a, b = normal((3, 64), 1), normal((4, 32), 2)
    d = torch.empty(3, 4, dtype=torch.bfloat16)
    with pytest.raises(ConfigError, match=r"a is bfloat16 \[3, 64\].*64 with 32"):
        deep_gemm.bf16_gemm_nt(a, b, d)
    with pytest.raises(ConfigError, match="3 rows and 4 columns"):
        deep_gemm.bf16_gemm_nt(a, normal((4, 64), 2), torch.empty(4, 4))
    with pytest.raises(ConfigError, match="contiguous last axis"):
        deep_gemm.bf16_gemm_nt(a, normal((4, 64), 2), torch.empty(4, 3).T)
    with pytest.raises(ConfigError, match="accumulator"):
        deep_gemm.bf16_gemm_nt(a, normal((4, 64), 2), d, d.float())
    pair = Quantized((3, 64), 3).pair(torch.int16)
    with pytest.raises(ConfigError, match="must be spread first"):
        deep_gemm.fp8_fp4_gemm_nt(pair, pair, torch.empty(3, 3), recipe=(1, 32, 32))
    with pytest.raises(ConfigError, match="hold 2 groups per row, 64 are needed"):
        deep_gemm.fp8_fp4_gemm_nt(pair, pair, torch.empty(3, 3), recipe=(1, 1, 1))
    with pytest.raises(ConfigError, match="use_psum_layout=False"):
        deep_gemm.m_grouped_bf16_gemm_nt_contiguous(
            a, a[None], d, torch.tensor([3]), use_psum_layout=False
        )
    with pytest.raises(ConfigError, match="for 1 experts"):
        deep_gemm.m_grouped_bf16_gemm_nt_contiguous(a, a[None], d[:, :3], torch.tensor([3, 3]))
    with pytest.raises(ConfigError, match="counts within them"):
        deep_gemm.m_grouped_bf16_gemm_nt_masked(a[None], a[None], d[None, :, :3], torch.tensor([4]))
    with pytest.raises(ConfigError, match="bhr,hdr->bhd"):
        deep_gemm.fp8_einsum("ij,kj->ik", pair, pair, d)
    with pytest.raises(ConfigError, match="one of each per split"):
        deep_gemm.tf32_hc_prenorm_gemm(a, a.float(), torch.empty(3, 3), torch.empty(3), 2)
    with pytest.raises(ConfigError, match="packed e2m1"):
        deep_gemm.fp8_fp4_gemm_nt(
            (random_bytes((3, 64), 1), pair[1]), pair, torch.empty(3, 3, dtype=torch.bfloat16)
        )
