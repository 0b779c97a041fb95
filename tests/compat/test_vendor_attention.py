"""Sparse attention of prompts and steps, and attention inside segments, against fp64 loops."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor

from deepinfer_neuron.compat.vendor.flash_attn.cute.interface import _flash_attn_fwd
from deepinfer_neuron.compat.vendor.flash_mla import (
    FlashMLASchedMeta,
    flash_mla_sparse_fwd,
    flash_mla_with_kvcache,
    fused_norm_rope_attn_rope_cast,
)
from deepinfer_neuron.errors import ConfigError, PlatformError
from tests.ops.number_formats import e2m1_values, e4m3_values, normal, random_bytes, wide

SCALE = 512**-0.5
HEADS = 3


def _attend(
    query: np.ndarray, keys: list[np.ndarray], sink: float, scale: float
) -> tuple[np.ndarray, float, float]:
    """One head of one row: output, largest score, log-sum-exp."""
    scores = [scale * float(query @ key) for key in keys]
    if not scores:
        return np.zeros_like(query), -math.inf, math.inf
    top = max(scores)
    shares = [math.exp(score - top) for score in scores]
    lse = top + math.log(sum(shares))
    out = sum((share / sum(shares)) * key for share, key in zip(shares, keys, strict=True))
    if sink == math.inf:
        return out * 0.0, top, lse
    return out / (1.0 + math.exp(min(sink - lse, 700.0))), top, lse


def _agrees(
    actual: tuple[Tensor, Tensor | None, Tensor],
    query: np.ndarray,
    keys: list[list[np.ndarray]],
    sink: list[float],
    scale: float = SCALE,
) -> bool:
    out, top, lse = actual
    for row in range(query.shape[0]):
        for head in range(query.shape[1]):
            expected = _attend(query[row, head], keys[row], sink[head], scale)
            value = wide(out)[row, head]
            if not np.allclose(value, expected[0], rtol=2.0**-7, atol=1e-5):
                return False
            if top is not None and not math.isclose(
                float(top[row, head]), expected[1], rel_tol=1e-5, abs_tol=1e-6
            ):
                return False
            if not math.isclose(float(lse[row, head]), expected[2], rel_tol=1e-5, abs_tol=1e-6):
                return False
    return True


SINKS = [[-math.inf] * 3, [0.3, -1.0, 2.0], [math.inf, -math.inf, 80.0]]


@pytest.mark.parametrize("sink", SINKS)
@pytest.mark.parametrize("lengths", [True, False])
def test_prompt(sink: list[float], lengths: bool) -> None:
    q, kv = normal((6, HEADS, 512), 1) * 3, normal((9, 1, 512), 2)
    indices = torch.tensor(
        [
            [0, 3, 8, 1],
            [-1, -1, -1, -1],
            [5, 5, -1, 5],
            [9, 100000, -7, 2],
            [4, 3, 2, 1],
            [-1, -1, 7, -1],
        ],
        dtype=torch.int32,
    )[:, None]
    count = torch.tensor([2, 4, 4, 4, 0, 3], dtype=torch.int32) if lengths else None
    result = flash_mla_sparse_fwd(
        q, kv, indices, sm_scale=SCALE, attn_sink=torch.tensor(sink), topk_length=count
    )
    rows = wide(kv)[:, 0]
    keys = []
    for row in range(6):
        seen = indices[row, 0, : int(count[row]) if count is not None else 4].tolist()
        keys.append([rows[i] for i in seen if 0 <= i < 9])
    assert _agrees(result, wide(q), keys, sink)
    out, top, lse = result
    assert (out.dtype, top.dtype, lse.dtype) == (torch.bfloat16, torch.float32, torch.float32)
    empty = [row for row in range(6) if not keys[row]]
    assert not out[empty].any()
    assert bool((lse[empty] == math.inf).all())
    assert bool((top[empty] == -math.inf).all())


def test_prompt_without_sink_equals_a_sink_of_minus_infinity() -> None:
    q, kv = normal((4, HEADS, 512), 3), normal((5, 1, 512), 4)
    indices = torch.randint(-1, 5, (4, 1, 6), generator=torch.Generator().manual_seed(5))
    none = flash_mla_sparse_fwd(q, kv, indices.int(), SCALE)
    sink = flash_mla_sparse_fwd(q, kv, indices.int(), SCALE, torch.full((HEADS,), -math.inf))
    assert all(torch.equal(a, b) for a, b in zip(none, sink, strict=True))


def test_padding_heads_changes_nothing() -> None:
    q, kv = normal((3, 8, 512), 6), normal((7, 1, 512), 7)
    indices = torch.randint(-1, 7, (3, 1, 5), generator=torch.Generator().manual_seed(8)).int()
    sink = normal((8,), 9, torch.float32)
    plain = flash_mla_sparse_fwd(q, kv, indices, SCALE, sink)
    wide_q, wide_sink = torch.zeros(3, 64, 512, dtype=torch.bfloat16), torch.zeros(64)
    wide_q[:, :8], wide_sink[:8] = q, sink
    padded = flash_mla_sparse_fwd(wide_q, kv, indices, SCALE, wide_sink)
    for a, b in zip(plain, padded, strict=True):
        assert torch.allclose(a.float(), b[:, :8].float(), rtol=2.0**-7, atol=1e-5)


@pytest.mark.parametrize(("rows", "keys", "width"), [(0, 4, 3), (2, 0, 3), (2, 4, 0), (1, 1, 1)])
def test_prompt_of_little(rows: int, keys: int, width: int) -> None:
    indices = torch.zeros(rows, 1, width, dtype=torch.int32)
    out, top, lse = flash_mla_sparse_fwd(
        normal((rows, HEADS, 512), 1), normal((keys, 1, 512), 2), indices, SCALE
    )
    assert out.shape == (rows, HEADS, 512)
    assert top.shape == lse.shape == (rows, HEADS)
    if not (keys and width):
        assert not out.any()


def test_large_prompts_are_cut_into_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    q, kv = normal((7, HEADS, 512), 10), normal((5, 1, 512), 11)
    indices = torch.randint(-1, 5, (7, 1, 6), generator=torch.Generator().manual_seed(12)).int()
    monkeypatch.setattr("deepinfer_neuron.ops.slot_attention._WORKSPACE_ELEMENTS", 2 * 6 * 512)
    rows = wide(kv)[:, 0]
    keys = [[rows[i] for i in indices[row, 0].tolist() if i >= 0] for row in range(7)]
    result = flash_mla_sparse_fwd(q, kv, indices, SCALE)
    assert _agrees(result, wide(q), keys, [-math.inf] * 3)


class Cache:
    """A paged cache of random records with a page stride and a storage offset."""

    def __init__(self, pages: int, size: int, record: int, seed: int) -> None:
        raw = random_bytes((pages * (size * record + 48) + 16,), seed)
        strides = (size * record + 48, record, record, 1)
        self.tensor = raw.as_strided((pages, size, 1, record), strides, 16)
        records = self.tensor.reshape(-1, record).long().numpy()
        if record == 528:
            records[:, 512:] = 120 + records[:, 512:] % 8
            records[:, :512][records[:, :512] % 128 == 127] = 0
            factor = np.repeat(2.0 ** (records[:, 512:] - 127.0), 32, axis=1)
            self.keys = e4m3_values(records[:, :512]) * factor
        else:
            records[:, 256:] = 0x20 + records[:, 256:] % 0x10
            codes = np.stack((records[:, :256] & 15, records[:, :256] >> 4), -1).reshape(-1, 512)
            self.keys = e2m1_values(codes) * np.repeat(e4m3_values(records[:, 256:]), 16, axis=1)
        flat = torch.from_numpy(records.astype(np.uint8))
        self.tensor.copy_(flat.view(pages, size, 1, record))


@pytest.mark.parametrize("extra", [None, 528, 288])
@pytest.mark.parametrize("sink", SINKS)
@pytest.mark.parametrize("lengths", [True, False])
def test_step(extra: int | None, sink: list[float], lengths: bool) -> None:
    main, other = Cache(4, 5, 528, 1), Cache(3, 7, extra or 288, 2)
    q = normal((5, 1, HEADS, 512), 3) * 0.1
    generator = torch.Generator().manual_seed(4)
    indices = torch.randint(-1, 20, (5, 1, 6), generator=generator).int()
    more = torch.randint(-1, 21, (5, 1, 8), generator=generator).int()
    indices[1], more[1] = -1, -1
    indices[2] = torch.tensor([3, 3, 3, -1, 7, 3])
    count = torch.tensor([6, 3, 4, 0, 1], dtype=torch.int32) if lengths else None
    extra_count = torch.tensor([0, 8, 2, 5, 8], dtype=torch.int32) if lengths else None
    meta = FlashMLASchedMeta()
    for _ in range(2):
        out, lse = flash_mla_with_kvcache(
            q=q,
            k_cache=main.tensor,
            block_table=None,
            cache_seqlens=None,
            head_dim_v=512,
            tile_scheduler_metadata=meta,
            softmax_scale=None,
            causal=False,
            is_fp8_kvcache=True,
            indices=indices,
            attn_sink=torch.tensor(sink),
            extra_k_cache=other.tensor if extra else None,
            extra_indices_in_kvcache=more if extra else None,
            topk_length=count,
            extra_topk_length=extra_count if extra else None,
            enable_batch_invariant=True,
        )
    assert out.shape == (5, 1, HEADS, 512)
    assert lse.shape == (5, HEADS, 1)
    keys = []
    for row in range(5):
        seen = indices[row, 0, : int(count[row]) if count is not None else 6].tolist()
        listed = [main.keys[i] for i in seen if i >= 0]
        if extra:
            seen = more[row, 0, : int(extra_count[row]) if extra_count is not None else 8].tolist()
            listed += [other.keys[i] for i in seen if i >= 0]
        keys.append(listed)
    assert _agrees((out[:, 0], None, lse[..., 0]), wide(q)[:, 0], keys, sink)


def test_step_with_empty_caches() -> None:
    for rows, pages in ((0, 2), (2, 0)):
        out, lse = flash_mla_with_kvcache(
            normal((rows, 1, HEADS, 512), 1),
            torch.zeros(pages, 4, 1, 528, dtype=torch.uint8),
            indices=torch.zeros(rows, 1, 3, dtype=torch.int32),
            softmax_scale=1.0,
        )
        assert out.shape == (rows, 1, HEADS, 512)
        assert bool((lse == math.inf).all())


def test_kernels_without_counterpart_can_be_imported() -> None:
    for name in ("prefill", "decode", "permute_q_b_proj", "permute_wv_proj"):
        with pytest.raises(PlatformError, match=name):
            getattr(fused_norm_rope_attn_rope_cast, name)(1, x=2)


def test_bad_input_is_named() -> None:
    q, kv = normal((2, HEADS, 512), 1), normal((4, 1, 512), 2)
    indices = torch.zeros(2, 1, 3, dtype=torch.int32)
    with pytest.raises(ConfigError, match="only 512"):
        flash_mla_sparse_fwd(q[..., :64], kv, indices, SCALE)
    with pytest.raises(ConfigError, match=r"give \[T, 1, topk\]"):
        flash_mla_sparse_fwd(q, kv, indices[:, 0], SCALE)
    with pytest.raises(ConfigError, match=r"give \[K, 1, 512\]"):
        flash_mla_sparse_fwd(q, kv[:, 0], indices, SCALE)
    cache = torch.zeros(1, 4, 1, 584, dtype=torch.uint8)
    with pytest.raises(ConfigError, match="584 bytes"):
        flash_mla_with_kvcache(q[:, None], cache, indices=indices)
    good = torch.zeros(1, 4, 1, 528, dtype=torch.uint8)
    with pytest.raises(ConfigError, match="indices=None"):
        flash_mla_with_kvcache(q[:, None], good)
    with pytest.raises(ConfigError, match="causal=True"):
        flash_mla_with_kvcache(q[:, None], good, indices=indices, causal=True)
    with pytest.raises(ConfigError, match="belong together"):
        flash_mla_with_kvcache(q[:, None], good, indices=indices, extra_k_cache=good)
    with pytest.raises(ConfigError, match=r"\[T, 1, H, 512\]"):
        flash_mla_with_kvcache(q, good, indices=indices)


ENDS = [[5], [1, 5, 5, 12], [0, 3, 3], [], [0]]


@pytest.mark.parametrize("ends", ENDS)
@pytest.mark.parametrize("listed", [True, False])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_segments(ends: list[int], listed: bool, scale: float | None) -> None:
    count = ends[-1] if ends else 0
    packed = normal((count, 3, 2, 80), 1)
    q, k, v = packed.unbind(1)
    lengths = ends if listed else torch.tensor([0, *ends], dtype=torch.int32)
    out, *_ = _flash_attn_fwd(
        q,
        k,
        v,
        cu_seqlens_q=lengths,
        cu_seqlens_k=lengths,
        max_seqlen_q=99,
        max_seqlen_k=99,
        softmax_scale=scale,
        causal=False,
        window_size_left=-1,
        window_size_right=-1,
        num_splits=1,
        pack_gqa=None,
        return_lse=False,
    )
    assert out.shape == q.shape
    factor = 80**-0.5 if scale is None else scale
    for start, end in pairwise([0, *ends]):
        for head in range(2):
            a, b, c = (wide(x)[start:end, head] for x in (q, k, v))
            scores = np.exp(factor * a @ b.T)
            expected = scores / scores.sum(1, keepdims=True) @ c
            assert np.allclose(wide(out)[start:end, head], expected, rtol=2.0**-8, atol=1e-6)


def test_segments_of_different_lengths_for_queries_and_keys() -> None:
    q, kv = normal((4, 1, 16), 1), normal((6, 1, 16), 2)
    out, _ = _flash_attn_fwd(q, kv, kv, [1, 3, 4], [2, 6, 6])
    for row, keys in ((0, slice(0, 2)), (1, slice(2, 6)), (2, slice(2, 6))):
        scores = np.exp(wide(kv)[keys, 0] @ wide(q)[row, 0] / 4)
        expected = scores / scores.sum() @ wide(kv)[keys, 0]
        assert np.allclose(wide(out)[row, 0], expected, rtol=2.0**-7, atol=1e-6)
    assert not out[3].any()
    single, _ = _flash_attn_fwd(q, kv, kv)
    assert single.shape == q.shape


def test_segments_refuse() -> None:
    q = normal((4, 2, 16), 1)
    for named in ({"causal": True}, {"window_size_left": 3}, {"return_lse": True}):
        with pytest.raises(ConfigError, match="full attention without statistics"):
            _flash_attn_fwd(q, q, q, [4], [4], **named)
    for ends in ([3], [5], [3, 2, 4]):
        with pytest.raises(ConfigError, match="there are 4 tokens"):
            _flash_attn_fwd(q, q, q, ends, ends)
    with pytest.raises(ConfigError, match="equal heads"):
        _flash_attn_fwd(q, q[:, :1], q[:, :1], [4], [4])
