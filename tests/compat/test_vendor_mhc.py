"""Hyper-connection calls against fp64 loops; the fused call against the single ones."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from deepinfer_neuron.compat.vendor.tile_kernels.mhc import (
    expand_to_mhc_fwd,
    mhc_fn_normw_merge_fwd,
    mhc_head_compute_mix_fwd,
    mhc_post_fwd,
    mhc_pre_apply_mix_fwd,
    mhc_pre_big_fuse_fwd,
    mhc_pre_split_mixes_fwd,
    mhc_reduce_partials_and_rmsnorm_fwd,
    mhc_sinkhorn_fwd,
)
from deepinfer_neuron.errors import ConfigError
from tests.ops.number_formats import normal, same_bits, wide

ROWS = pytest.mark.parametrize("rows", [0, 1, 7])


def _f32(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    return normal(shape, seed, torch.float32)


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 1.0 / (1.0 + np.exp(-x))


@ROWS
def test_expand(rows: int) -> None:
    x, out = normal((rows, 40), 1), torch.empty(rows, 4, 40, dtype=torch.bfloat16)
    expand_to_mhc_fwd(x, out)
    assert all(torch.equal(out[:, stream], x) for stream in range(4))


def test_merged_weight() -> None:
    fn, weight, out = _f32((24, 160), 2), _f32((160,), 3), torch.empty(24, 160)
    mhc_fn_normw_merge_fwd(fn, weight, out)
    assert torch.equal(out, fn * weight)


@ROWS
@pytest.mark.parametrize("splits", [1, 16])
def test_reduction(rows: int, splits: int) -> None:
    mul, sq = _f32((splits, rows, 1, 24), 4), _f32((splits, rows, 1), 5).abs()
    out_mul, out_sq = torch.empty(rows, 1, 24), torch.empty(rows, 1)
    out = torch.empty(rows, 24)
    mhc_reduce_partials_and_rmsnorm_fwd(
        mul, sq, out_mul, out_sq, out, rms_group_size=160, rms_eps=1e-6, n_splits=splits
    )
    total, squares = wide(mul).sum(0), wide(sq).sum(0)
    assert np.allclose(out_mul.numpy(), total, rtol=1e-5, atol=1e-6)
    assert np.allclose(out_sq.numpy(), squares, rtol=1e-5)
    exact = total[:, 0] / np.sqrt(squares / 160 + 1e-6)
    assert np.allclose(out.numpy(), exact, rtol=1e-5, atol=1e-5)


@ROWS
def test_split(rows: int) -> None:
    mixes, scale, base = _f32((rows, 24), 6), _f32((3,), 7), _f32((24,), 8)
    pre, post, comb = torch.empty(rows, 4), torch.empty(rows, 4), torch.empty(rows, 16)
    mhc_pre_split_mixes_fwd(mixes, scale, base, pre, post, comb, 2.0, 1e-3)
    z = wide(mixes) * np.repeat(wide(scale), (4, 4, 16)) + wide(base)
    assert np.allclose(pre.numpy(), _sigmoid(z[:, :4]) + 1e-3, rtol=1e-6)
    assert np.allclose(post.numpy(), 2.0 * _sigmoid(z[:, 4:8]), rtol=1e-6)
    assert np.allclose(comb.numpy(), z[:, 8:], rtol=1e-6, atol=1e-6)
    with pytest.raises(ConfigError, match="24 columns for 4 streams"):
        mhc_pre_split_mixes_fwd(mixes[:, :8], scale, base, pre, post, comb, 2.0, 1e-3)


def _sinkhorn(x: np.ndarray, repeat: int, eps: float) -> np.ndarray:
    x = np.exp(x - x.max(-1, keepdims=True))
    x = x / x.sum(-1, keepdims=True) + eps
    x = x / (x.sum(-2, keepdims=True) + eps)
    for _ in range(repeat - 1):
        x = x / (x.sum(-1, keepdims=True) + eps)
        x = x / (x.sum(-2, keepdims=True) + eps)
    return x


@ROWS
@pytest.mark.parametrize("repeat", [1, 2, 20])
def test_sinkhorn(rows: int, repeat: int) -> None:
    x = _f32((rows, 4, 4), 9) * 3
    out = torch.empty(rows, 4, 4)
    mhc_sinkhorn_fwd(x, out, repeat, 1e-6)
    assert np.allclose(out.numpy(), _sinkhorn(wide(x), repeat, 1e-6), rtol=1e-5)
    with pytest.raises(ConfigError, match="repeat is 0"):
        mhc_sinkhorn_fwd(x, out, 0, 1e-6)


@ROWS
def test_collapse(rows: int) -> None:
    x, mix = normal((rows, 4, 64), 10), _f32((rows, 4), 11)
    out = torch.empty(rows, 64, dtype=torch.bfloat16)
    mhc_pre_apply_mix_fwd(x, mix, out)
    exact = (wide(x) * wide(mix)[..., None]).sum(1)
    assert np.allclose(wide(out), exact, rtol=2.0**-8, atol=1e-5)


@ROWS
@pytest.mark.parametrize("given", [True, False])
def test_new_streams_use_comb_by_columns(rows: int, given: bool) -> None:
    x, residual = normal((1, rows, 48), 12), normal((1, rows, 4, 48), 13)
    post, comb = _f32((1, rows, 4, 1), 14), _f32((1, rows, 4, 4), 15)
    kept = torch.empty_like(residual) if given else None
    out = mhc_post_fwd(x, residual, post, comb, kept)
    assert kept is None or out is kept
    assert out.shape == residual.shape
    for new in range(4):
        exact = wide(x)[0] * wide(post)[0, :, new]
        for old in range(4):
            exact = exact + wide(comb)[0, :, old, new, None] * wide(residual)[0, :, old]
        assert np.allclose(wide(out)[0, :, new], exact, rtol=2.0**-8, atol=1e-5)


def test_a_permutation_moves_streams() -> None:
    residual = normal((1, 1, 4, 8), 16)
    comb = torch.zeros(1, 1, 4, 4)
    comb[0, 0, 0, 3] = 1.0
    out = mhc_post_fwd(torch.zeros(1, 1, 8).bfloat16(), residual, torch.zeros(1, 1, 4, 1), comb)
    assert torch.equal(out[0, 0, 3], residual[0, 0, 0])
    assert not out[0, 0, :3].any()


@ROWS
def test_head(rows: int) -> None:
    mix, scale, base = _f32((rows, 4), 17), _f32((1,), 18), _f32((4,), 19)
    out = torch.empty(rows, 4)
    mhc_head_compute_mix_fwd(mix, scale, base, out, 1e-3)
    exact = _sigmoid(wide(mix) * wide(scale) + wide(base)) + 1e-3
    assert np.allclose(out.numpy(), exact, rtol=1e-6)


@ROWS
@pytest.mark.parametrize("splits", [1, 16])
def test_fused_equals_single_calls(rows: int, splits: int) -> None:
    mul, sq = _f32((splits, rows, 24), 20), _f32((splits, rows), 21).abs()
    scale, base, residual = _f32((3,), 22), _f32((24,), 23), normal((rows, 4, 32), 24)
    post, comb = torch.empty(rows, 4), torch.empty(rows, 16)
    collapsed = torch.empty(rows, 32, dtype=torch.bfloat16)
    mhc_pre_big_fuse_fwd(
        mul, sq, scale, base, residual, post, comb, collapsed, 1e-20, 1e-6, 1e-6, 2.0, 20,
        n_splits=splits,
    )  # fmt: skip
    mixes, ignored = torch.empty(rows, 24), torch.empty(rows, 1, 24)
    mhc_reduce_partials_and_rmsnorm_fwd(
        mul[:, :, None], sq[..., None], ignored, torch.empty(rows, 1), mixes,
        rms_group_size=128, rms_eps=1e-20, n_splits=splits,
    )  # fmt: skip
    pre, own_post, own_comb = torch.empty(rows, 4), torch.empty(rows, 4), torch.empty(rows, 16)
    mhc_pre_split_mixes_fwd(mixes, scale, base, pre, own_post, own_comb, 2.0, 1e-6)
    matrices = torch.empty(rows, 4, 4)
    mhc_sinkhorn_fwd(own_comb.view(rows, 4, 4), matrices, 20, 1e-6)
    own = torch.empty(rows, 32, dtype=torch.bfloat16)
    mhc_pre_apply_mix_fwd(residual, pre, own)
    assert same_bits(post, own_post)
    assert same_bits(comb, matrices.view(rows, 16))
    assert same_bits(collapsed, own)
    with pytest.raises(ConfigError, match=f"for {splits + 1} splits"):
        mhc_pre_big_fuse_fwd(
            mul, sq, scale, base, residual, post, comb, collapsed, 1e-20, 1e-6, 1e-6, 2.0, 20,
            n_splits=splits + 1,
        )  # fmt: skip
