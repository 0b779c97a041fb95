"""Scale layouts, alignments and knobs."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from deepinfer_neuron.compat.vendor import deep_gemm, knobs, tile_kernels
from deepinfer_neuron.compat.vendor.tile_kernels.quant import batched_transpose_weight_sf
from deepinfer_neuron.errors import ConfigError
from deepinfer_neuron.ops.scale_layout import (
    aligned_length,
    column_major,
    pack_exponents,
    scale_values,
    unpack_exponents,
)
from tests.compat.vendor_plain import WORDS, by_columns, packed_words
from tests.ops.number_formats import random_bytes, same_bits


@pytest.fixture(params=WORDS, ids=["int16", "int32"])
def word(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.dtype:
    monkeypatch.setattr(knobs.KNOBS, "scale_word", request.param)
    return request.param


def _powers(shape: tuple[int, ...], seed: int) -> tuple[torch.Tensor, np.ndarray]:
    exponents = random_bytes(shape, seed, 1, 255).numpy()
    return torch.from_numpy(2.0 ** (exponents.astype(np.float64) - 127)).float(), exponents


@pytest.mark.parametrize(("mn", "itemsize"), [(0, 4), (1, 4), (4, 4), (5, 2), (8, 2), (17, 1)])
def test_aligned_size(mn: int, itemsize: int) -> None:
    size = deep_gemm.get_tma_aligned_size(mn, itemsize)
    assert size >= mn
    assert size * itemsize % 16 == 0
    assert size - mn < 16 / itemsize
    assert size == aligned_length(mn, itemsize)


def _naive(exponents: np.ndarray, mn: int, gran_mn: int, word: torch.dtype) -> torch.Tensor:
    return packed_words(exponents[..., [row // gran_mn for row in range(mn)], :], word)


@pytest.mark.parametrize(
    ("mn", "k", "recipe"), [(70, 160, (32, 32)), (1, 32, (1, 32)), (9, 416, (1, 32))]
)
@pytest.mark.parametrize("groups", [None, 3])
def test_required_layout(
    word: torch.dtype, mn: int, k: int, recipe: tuple[int, int], groups: int | None
) -> None:
    lead = () if groups is None else (groups,)
    shape = (*lead, -(-mn // recipe[0]), -(-k // recipe[1]))
    sf, exponents = _powers(shape, mn + k)
    out = deep_gemm.transform_sf_into_required_layout(sf, mn, k, recipe, groups)
    assert same_bits(out, _naive(exponents, mn, recipe[0], word))
    assert out.stride()[-2:] == (1, deep_gemm.get_tma_aligned_size(mn, word.itemsize))
    wide = (7, recipe[0], recipe[1])
    again = deep_gemm.transform_sf_into_required_layout(
        sf, mn, k, recipe=wide, num_groups=groups, is_sfa=False, disable_ue8m0_cast=False
    )
    assert same_bits(again, out)
    left = deep_gemm.transform_sf_into_required_layout(
        sf, mn, k, (recipe[0], 7, recipe[1]), groups, is_sfa=True
    )
    assert same_bits(left, out)
    assert deep_gemm.transform_sf_into_required_layout(out, mn, k, recipe, groups) is out


def test_required_layout_takes_transposed_scales(word: torch.dtype) -> None:
    sf, exponents = _powers((5, 3), 4)
    out = deep_gemm.transform_sf_into_required_layout(by_columns(sf), 160, 96, (32, 32))
    assert same_bits(out, _naive(exponents, 160, 32, word))


def test_required_layout_refuses() -> None:
    sf, _ = _powers((3, 3), 5)
    call = deep_gemm.transform_sf_into_required_layout
    with pytest.raises(ConfigError, match=r"give torch.float32 \[..., 2, 3\]"):
        call(sf, 64, 96, (32, 32))
    with pytest.raises(ConfigError, match="is_sfa"):
        call(sf, 96, 96, (1, 32, 32))
    with pytest.raises(ConfigError, match="num_groups=2"):
        call(sf, 96, 96, (32, 32), 2)
    with pytest.raises(ConfigError, match="disable_ue8m0_cast"):
        call(sf, 96, 96, (32, 32), disable_ue8m0_cast=True)
    with pytest.raises(ConfigError, match="do not fit"):
        call(torch.zeros(96, 1, dtype=torch.int16), 96, 96, (1, 32))
    with pytest.raises(ConfigError, match="do not fit"):
        call(sf.double(), 96, 96, (32, 32))


@pytest.mark.parametrize("dtype", WORDS)
@pytest.mark.parametrize("shape", [(3, 1), (5, 7), (2, 3, 8), (0, 4)])
def test_packing_and_back(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    exponents = random_bytes(shape, 6)
    words = pack_exponents(exponents, dtype)
    assert same_bits(words, packed_words(exponents.numpy(), dtype))
    for kept in (words, by_columns(words), column_major(words, shape[-2] + 3)):
        assert same_bits(unpack_exponents(kept, shape[-1]), exponents)
    with pytest.raises(ConfigError, match="are needed"):
        unpack_exponents(words, 100)
    with pytest.raises(ConfigError, match="int16 or int32"):
        pack_exponents(exponents, torch.int64)


def test_values_of_every_layout() -> None:
    sf, exponents = _powers((6, 5), 7)
    for scale in (
        sf,
        by_columns(sf, 8),
        packed_words(exponents, torch.int16),
        by_columns(packed_words(exponents, torch.int32), 8),
    ):
        assert same_bits(scale_values(scale, 5), sf)
    small = torch.tensor([[0.5, 448.0, 2.0**-9]]).to(torch.float8_e4m3fn)
    assert scale_values(small, 3).tolist() == [[0.5, 448.0, 2.0**-9]]


@pytest.mark.parametrize("shape", [(2, 3), (1, 1), (2, 5, 2)])
@pytest.mark.parametrize("block", [1, 4])
def test_scales_of_weights_and_transposes(
    word: torch.dtype, shape: tuple[int, ...], block: int
) -> None:
    sf, exponents = _powers(shape, 8)
    (first, second), (again, turned) = batched_transpose_weight_sf([sf, sf], block, [False, True])
    n, k = shape[-2] * block, shape[-1] * block
    assert same_bits(first, _naive(exponents, n, block, word))
    assert same_bits(second, _naive(exponents.swapaxes(-1, -2), k, block, word))
    assert first.stride()[-2:] == (1, n)
    assert second.stride()[-2:] == (1, k)
    assert same_bits(again, first)
    assert same_bits(turned, second.transpose(-1, -2))
    other, values = _powers(shape, 9)
    pair = (first, turned)
    (written,) = batched_transpose_weight_sf([other], block, [True], outs=[pair])
    assert written[0] is first
    assert same_bits(first, _naive(values, n, block, word))
    assert same_bits(turned.transpose(-1, -2), _naive(values.swapaxes(-1, -2), k, block, word))
    with pytest.raises(ConfigError, match="float32"):
        batched_transpose_weight_sf([sf.double()], block, [False])


def test_alignments() -> None:
    kept = knobs.KNOBS.row_alignment, knobs.KNOBS.token_alignment
    assert kept == (128, 128)
    try:
        assert deep_gemm.get_theoretical_mk_alignment_for_contiguous_layout(7) % 32 == 0
        deep_gemm.set_mk_alignment_for_contiguous_layout(64)
        tile_kernels.set_token_alignment(96)
        assert deep_gemm.get_mk_alignment_for_contiguous_layout() == 64
        assert tile_kernels.get_token_alignment() == 96
        for refused in (
            deep_gemm.set_mk_alignment_for_contiguous_layout,
            tile_kernels.set_token_alignment,
        ):
            with pytest.raises(ConfigError, match="positive"):
                refused(0)
    finally:
        knobs.KNOBS.row_alignment, knobs.KNOBS.token_alignment = kept


def test_knobs_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("cores", "early_launch", "deterministic"):
        monkeypatch.setattr(knobs.KNOBS, name, getattr(knobs.KNOBS, name))
    for library in (deep_gemm, tile_kernels):
        library.set_num_sms(5)
        library.set_pdl(True)
        library.use_deterministic_algorithms(False)
    assert deep_gemm.get_num_sms() == 5
    assert tile_kernels.get_num_vec_cores() == 10
    domains = getattr(deep_gemm, "locality_domain").get_balanced_sm_locality_domains()  # noqa: B009
    assert sorted(core for domain in domains for core in domain) == [0, 1, 2, 3, 4]
    assert (knobs.KNOBS.early_launch, knobs.KNOBS.deterministic) == (True, False)


def test_platform_question(word: torch.dtype) -> None:
    assert tile_kernels.config.is_ascend() is (word == torch.int16)
    assert knobs.KNOBS.padded_column(5) == (5 if word == torch.int16 else 8)


def test_small_helpers() -> None:
    utils = tile_kernels.utils
    names = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int8]
    assert [utils.dtype_to_str(dtype) for dtype in names] == ["fp32", "bf16", "e4m3", "e2m1"]
    with pytest.raises(ConfigError, match="float64"):
        utils.dtype_to_str(torch.float64)
    assert [utils.ceil_div(x, 4) for x in (0, 1, 4, 5)] == [0, 1, 1, 2]
    assert [utils.align(x, 4) for x in (0, 1, 4, 5)] == [0, 4, 4, 8]
