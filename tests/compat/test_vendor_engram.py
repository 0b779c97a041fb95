"""Hashes and gates of n-gram memories, and rotary embedding in place."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from deepinfer_neuron.compat.vendor.tile_kernels import engram
from deepinfer_neuron.compat.vendor.tile_kernels import torch as reference
from deepinfer_neuron.compat.vendor.tile_kernels.transform import apply_rotary
from deepinfer_neuron.errors import ConfigError
from tests.ops.number_formats import bf16, fused, normal, same_bits, wide


def _wrapped(x: int) -> int:
    x &= (1 << 64) - 1
    return x - (1 << 64) if x >> 63 else x


@pytest.mark.parametrize("tokens", [0, 1, 7])
@pytest.mark.parametrize("image", [True, False])
def test_hash(tokens: int, image: bool) -> None:
    rng = np.random.default_rng(1)
    ids = torch.from_numpy(rng.integers(0, 129280, (tokens, 3))).int()
    multipliers = torch.from_numpy(rng.integers(-(1 << 62), 1 << 62, (2, 3)) | 1)
    sizes = torch.from_numpy(rng.integers(2, 1 << 20, (2, 2, 4))).int()
    offsets = reference.engram.make_offsets(sizes)
    mask = torch.arange(tokens) % 3 == 1 if image else None
    out = engram.engram_hash(ids, multipliers, sizes, offsets, mask)
    assert out.shape == (2, tokens, 8)
    assert out.dtype == offsets.dtype == torch.int32
    negative = 0
    for layer in range(2):
        flat = sizes[layer].flatten().tolist()
        assert offsets[layer].tolist() == [sum(flat[:i]) for i in range(8)]
        for token in range(tokens):
            if mask is not None and mask[token]:
                assert out[layer, token].tolist() == [-1] * 8
                continue
            value = _wrapped(int(ids[token, 0]) * int(multipliers[layer, 0]))
            for gram in (1, 2):
                value = _wrapped(value ^ int(ids[token, gram]) * int(multipliers[layer, gram]))
                negative += value < 0
                for part in range(4):
                    column = 4 * (gram - 1) + part
                    row = value % int(sizes[layer, gram - 1, part])
                    assert int(out[layer, token, column]) == row + sum(flat[:column])
    assert negative or tokens == 0


def _gate(x, k, weight, v, eps: float, clamp: float) -> np.ndarray:
    dot = (x * weight * k).sum()
    d = dot / math.sqrt((x * x).mean() + eps) / math.sqrt((k * k).mean() + eps)
    d /= math.sqrt(len(x))
    root = math.sqrt(max(abs(d), clamp))
    return x + v / (1.0 + math.exp(-root if d >= 0 else root))


@pytest.mark.parametrize("tokens", [0, 1, 6])
@pytest.mark.parametrize("clamp", [1e-6, 0.5])
@pytest.mark.parametrize("inplace", [True, False])
def test_gate(tokens: int, clamp: float, inplace: bool) -> None:
    hidden, kv = normal((tokens, 4, 96), 2), normal((tokens, 5, 96), 3)
    weight = engram.fused_weight(normal((4, 96), 4), normal((4, 96), 5))
    assert weight.dtype == torch.float32
    assert torch.equal(weight, normal((4, 96), 4).float() * normal((4, 96), 5).float())
    kept, mask = hidden.clone(), torch.arange(tokens) % 4 == 2
    if tokens:
        kv[0, 1] = 0.0
    out, *rest = engram.engram_gate_fwd(
        hidden, kv, weight, 1e-20, clamp, image_token_mask=mask, inplace=inplace
    )
    assert rest == [None] * 4
    assert (out is hidden) is inplace
    assert inplace or torch.equal(hidden, kept)
    for token in range(tokens):
        for stream in range(4):
            if mask[token]:
                assert torch.equal(out[token, stream], kept[token, stream])
                continue
            exact = _gate(
                wide(kept)[token, stream],
                wide(kv)[token, stream],
                wide(weight)[stream],
                wide(kv)[token, 4],
                1e-20,
                clamp,
            )
            assert np.allclose(wide(out)[token, stream], exact, rtol=2.0**-8, atol=1e-5)


def test_gate_refuses() -> None:
    hidden, kv = normal((2, 4, 8), 1), normal((2, 4, 8), 2)
    with pytest.raises(ConfigError, match=r"\[T, hc \+ 1, H\]"):
        engram.engram_gate_fwd(hidden, kv, torch.ones(4, 8), 1e-6, 1e-6)
    with pytest.raises(ConfigError, match="save_for_backward"):
        engram.engram_gate_fwd(hidden, kv, torch.ones(4, 8), 1e-6, 1e-6, True)


def _table(length: int, width: int) -> torch.Tensor:
    angle = torch.arange(length)[:, None] * 0.37 + torch.arange(width // 2)
    return torch.cat((angle.cos(), angle.sin()), 1)


def _rotated(
    row: np.ndarray, turns: np.ndarray, interleaved: bool, conjugate: bool, dtype: torch.dtype
) -> np.ndarray:
    half = len(row) // 2
    pairs = (
        [(2 * i, 2 * i + 1) for i in range(half)]
        if interleaved
        else [(i, i + half) for i in range(half)]
    )
    out = np.zeros_like(row)
    for i, (a, b) in enumerate(pairs):
        cos, sin = turns[i], turns[half + i] * (-1.0 if conjugate else 1.0)
        out[a] = fused(row[a], cos, float(np.float32(row[b]) * np.float32(-sin)))
        out[b] = fused(row[a], sin, float(np.float32(row[b]) * np.float32(cos)))
    return out if dtype == torch.float32 else bf16(out)


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("conjugate", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("positions", [None, torch.int32, torch.int64])
def test_rotary_on_a_strided_tail(
    interleaved: bool, conjugate: bool, dtype: torch.dtype, positions: torch.dtype | None
) -> None:
    table, buffer = _table(40, 64), normal((3, 2, 80), 6, dtype)
    kept, place = buffer.clone(), torch.tensor([7, 0, 31])
    apply_rotary(
        buffer[..., 16:],
        table,
        positions=None if positions is None else place.to(positions),
        interleaved=interleaved,
        conjugate=conjugate,
        seqlen_offset=5,
    )
    assert same_bits(buffer[..., :16], kept[..., :16])
    for token in range(3):
        row = (token if positions is None else int(place[token])) + 5
        for head in range(2):
            expected = _rotated(
                wide(kept)[token, head, 16:], wide(table)[row], interleaved, conjugate, dtype
            )
            assert np.array_equal(wide(buffer)[token, head, 16:], expected)


@pytest.mark.parametrize("positions", [True, False])
def test_rotary_of_batches_with_keys(positions: bool) -> None:
    table = _table(50, 128)
    place = torch.tensor([[3, 4, 5], [40, 0, 9]])
    query, key = normal((3, 2, 4, 128), 7).transpose(0, 1), normal((2, 3, 1, 128), 8)
    flat = [x.clone() for x in (query, key)]
    apply_rotary(query, table, key, place if positions else None, interleaved=True)
    for x, before in zip((query, key), flat, strict=True):
        for batch in range(2):
            rows = before[batch].contiguous()
            own = place[batch] if positions else torch.arange(3)
            apply_rotary(rows, table, positions=own, interleaved=True)
            assert same_bits(x[batch], rows)


def test_rotary_back_and_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deepinfer_neuron.ops.rotate._CHUNK_ELEMENTS", 1)
    x, table = normal((5, 2, 64), 9, torch.float32), _table(9, 64)
    turned = x.clone()
    apply_rotary(turned, table)
    apply_rotary(turned, table, conjugate=True)
    assert torch.allclose(turned, x, atol=1e-6)
    apply_rotary(x[:0], table, positions=torch.zeros(0, dtype=torch.int32))
    with pytest.raises(ConfigError, match="with the table's width"):
        apply_rotary(x[..., :32], table)
    with pytest.raises(ConfigError, match="one per token"):
        apply_rotary(x, table, positions=torch.zeros(4, dtype=torch.int32))
