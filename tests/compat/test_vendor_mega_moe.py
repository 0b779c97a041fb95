"""The expert layer in one call against its parts, and against fp64 loops."""

from __future__ import annotations

import types

import numpy as np
import pytest
import torch
from torch import Tensor

from deepinfer_neuron.compat.vendor import deep_gemm, knobs
from deepinfer_neuron.compat.vendor.tile_kernels.quant import (
    per_token_cast,
    per_token_cast_back,
    swiglu_forward_and_per_token_cast,
)
from deepinfer_neuron.errors import ConfigError, PlatformError
from tests.compat.vendor_plain import WORDS, Quantized, packed_words
from tests.ops.number_formats import normal, same_bits, wide

EXPERTS, HIDDEN, INNER, TOPK = 5, 128, 64, 3


@pytest.fixture(params=WORDS, ids=["int16", "int32"])
def word(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.dtype:
    monkeypatch.setattr(knobs.KNOBS, "scale_word", request.param)
    return request.param


class Layer:
    """Weights, tokens and routing; -1 entries and a token without any expert included."""

    def __init__(self, mma: str, word: torch.dtype, tokens: int, shared: bool) -> None:
        self.mma, self.word, self.tokens = mma, word, tokens
        self.quantized = mma != "bf16xbf16"
        self.l1 = self._weight((EXPERTS, 2 * INNER, HIDDEN), 1)
        self.l2 = self._weight((EXPERTS, HIDDEN, INNER), 2)
        self.shared = None
        if shared:
            self.shared = self._weight((2 * INNER, HIDDEN), 3), self._weight((HIDDEN, INNER), 4)
        x = normal((tokens, HIDDEN), 5)
        self.x = per_token_cast(x, "e4m3", 32, round_sf=True, use_packed_ue8m0=True)
        if not self.quantized:
            self.x = (x, None)
        rng = np.random.default_rng(6)
        chosen = np.array([rng.permutation(EXPERTS - 1)[:TOPK] for _ in range(tokens)])
        self.idx = torch.from_numpy(chosen.reshape(tokens, TOPK).astype(np.int64))
        self.idx[1::3, 1] = -1
        self.idx[2::3] = -1
        self.weights = normal((tokens, TOPK), 7, torch.float32).abs()

    def _weight(self, shape: tuple[int, ...], seed: int):
        if not self.quantized:
            return normal(shape, seed) * 0.1
        made = Quantized(shape, seed, "e2m1" if self.mma == "fp8xfp4" else "e4m3")
        made.exponents -= 6
        return made.codes, packed_words(made.exponents, self.word)

    def buffer(self, base=None, rows: int = 20):
        made = deep_gemm.SymmBuffer(
            None,
            num_experts=EXPERTS,
            num_max_tokens_per_rank=rows,
            num_topk=TOPK,
            hidden=HIDDEN,
            intermediate_hidden=INNER,
            num_shared_experts=int(self.shared is not None),
            mma_type=self.mma,
            activation="swiglu",
            base=base,
        )
        made.topk_idx.fill_(77)
        made.x[: self.tokens] = self.x[0]
        if self.quantized:
            made.x_sf[: self.tokens] = self.x[1]
        made.topk_idx[: self.tokens] = self.idx
        made.topk_weights[: self.tokens] = self.weights
        return made

    def product(self, x, weight, ends: Tensor | None) -> Tensor:
        """One product of the parts."""
        rows = x.shape[0] if isinstance(x, Tensor) else x[0].shape[0]
        width = (weight if isinstance(weight, Tensor) else weight[0]).shape[-2]
        out = torch.zeros(rows, width, dtype=torch.bfloat16)
        if ends is None:
            call = deep_gemm.fp8_fp4_gemm_nt if self.quantized else deep_gemm.bf16_gemm_nt
            call(x, weight, out)
        elif self.quantized:
            deep_gemm.m_grouped_fp8_fp4_gemm_nt_contiguous(x, weight, out, ends)
        else:
            deep_gemm.m_grouped_bf16_gemm_nt_contiguous(x, weight, out, ends)
        return out

    def experts(self, x, weights, ends, share, clamp):
        inner = swiglu_forward_and_per_token_cast(
            self.product(x, weights[0], ends),
            "e4m3" if self.quantized else "bf16",
            32 if self.quantized else None,
            psum_num_tokens_per_expert=ends,
            topk_weights=share,
            clamp_value=clamp,
            use_tma_aligned_col_major_sf=self.quantized,
            round_sf=self.quantized,
            use_packed_ue8m0=self.quantized,
        )
        return self.product(inner, weights[1], ends)

    def by_parts(self, clamp: float | None, alignment: int) -> Tensor:
        """Dispatch into aligned rows, products, activation, ordered sum: with plain loops."""
        rows: list[tuple[int, int] | None] = []
        ends = []
        for expert in range(EXPERTS):
            rows += [None] * (-len(rows) % alignment)
            for token in range(self.tokens):
                for slot in range(TOPK):
                    if int(self.idx[token, slot]) == expert:
                        rows.append((token, slot))
            ends.append(len(rows))
        rows += [None] * (-len(rows) % alignment)
        source = [0 if row is None else row[0] for row in rows]
        share = torch.tensor([0.0 if r is None else float(self.weights[r]) for r in rows])
        x, sf = self.x
        if self.quantized:
            sent = x.view(torch.uint8)[source].view(torch.float8_e4m3fn), sf[source]
            own = x, sf
        else:
            sent = own = x
            sent = x[source]
        psum = torch.tensor(ends, dtype=torch.int32)
        results = self.experts(sent, (self.l1, self.l2), psum, share, clamp)
        total = torch.zeros(self.tokens, HIDDEN)
        if self.shared is not None:
            total = self.experts(own, self.shared, None, None, clamp).float()
        place = {row: number for number, row in enumerate(rows) if row is not None}
        for token in range(self.tokens):
            for slot in range(TOPK):
                if (token, slot) in place:
                    total[token] += results[place[token, slot]].float()
        return total.to(torch.bfloat16)

    def call(self, buffer, clamp: float | None) -> tuple[Tensor, Tensor]:
        y = torch.full((self.tokens, HIDDEN), 7.0, dtype=torch.bfloat16)
        stats = torch.full((EXPERTS,), 100, dtype=torch.int32)
        call = deep_gemm.fp8_fp4_mega_moe if self.quantized else deep_gemm.bf16_mega_moe
        l1, l2 = deep_gemm.transform_weights_for_mega_moe(self.l1, self.l2)
        call(
            y,
            l1,
            l2,
            buffer,
            shared_l1_weights=None if self.shared is None else self.shared[0],
            shared_l2_weights=None if self.shared is None else self.shared[1],
            cumulative_local_expert_recv_stats=stats,
            activation="swiglu",
            activation_clamp=clamp,
            fast_math=True,
        )
        return y, stats


@pytest.mark.parametrize("mma", ["fp8xfp4", "fp8xfp8", "bf16xbf16"])
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize(("tokens", "clamp"), [(0, None), (1, 10.0), (13, None), (13, 2.0)])
def test_equals_its_parts(
    word: torch.dtype,
    mma: str,
    shared: bool,
    tokens: int,
    clamp: float | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(knobs.KNOBS, "row_alignment", 8)
    monkeypatch.setattr(knobs.KNOBS, "token_alignment", 8)
    layer = Layer(mma, word, tokens, shared)
    y, stats = layer.call(layer.buffer(), clamp)
    assert same_bits(y, layer.by_parts(clamp, 8))
    counts = [int((layer.idx == expert).sum()) for expert in range(EXPERTS)]
    assert stats.tolist() == [100 + count for count in counts]


def test_against_plain_numbers() -> None:
    layer = Layer("fp8xfp8", torch.int16, 4, True)
    y, _ = layer.call(layer.buffer(), None)

    def decode(pair) -> np.ndarray:
        flat = pair[0].flatten(0, -2), pair[1].flatten(0, -2)
        return wide(per_token_cast_back(flat, "fp32", 32)).reshape(pair[0].shape)

    def run(x: np.ndarray, l1: np.ndarray, l2: np.ndarray, share: float) -> np.ndarray:
        gate, up = np.split(l1 @ x, 2)
        return l2 @ (gate / (1 + np.exp(-gate)) * up * share)

    x, l1, l2 = decode(layer.x), decode(layer.l1), decode(layer.l2)
    for token in range(4):
        exact = run(x[token], *(decode(w) for w in layer.shared), 1.0)
        for slot in range(TOPK):
            expert = int(layer.idx[token, slot])
            if expert >= 0:
                share = float(layer.weights[token, slot])
                exact = exact + run(x[token], l1[expert], l2[expert], share)
        error = np.linalg.norm(wide(y)[token] - exact) / np.linalg.norm(exact)
        assert error < 0.06


def test_buffers_share_storage(word: torch.dtype) -> None:
    layer = Layer("fp8xfp4", word, 3, False)
    first = layer.buffer(rows=16)
    second = layer.buffer(base=first, rows=8)
    assert second.buffer.data_ptr() == first.buffer.data_ptr()
    assert first.buffer.nbytes == second.buffer.nbytes
    assert second.num_max_tokens_per_rank == 8
    assert second.x_sf.shape == (8, HIDDEN // 32 // word.itemsize)
    assert second.x_sf.dtype == word
    y, _ = layer.call(second, None)
    assert same_bits(y, layer.by_parts(None, 128))
    with pytest.raises(ConfigError, match="create the largest buffer first"):
        layer.buffer(base=second, rows=64)
    first.destroy()
    assert first.buffer.nbytes == 0
    assert second.buffer.nbytes > 0


def test_sizes_and_refusals() -> None:
    assert deep_gemm.get_block_m_for_mega_moe(1, 8, 64, 5, 2, "fp8xfp4") % 32 == 0
    layer = Layer("fp8xfp4", torch.int16, 3, False)
    buffer = layer.buffer()
    with pytest.raises(ConfigError, match="holds 20 tokens"):
        deep_gemm.fp8_fp4_mega_moe(
            torch.empty(21, HIDDEN, dtype=torch.bfloat16), layer.l1, layer.l2, buffer
        )
    with pytest.raises(ConfigError, match="'gelu'"):
        deep_gemm.fp8_fp4_mega_moe(
            torch.empty(1, HIDDEN, dtype=torch.bfloat16),
            layer.l1,
            layer.l2,
            buffer,
            activation="gelu",
        )
    with pytest.raises(ConfigError, match="'fp4xfp4'"):
        deep_gemm.SymmBuffer(None, 1, 1, 1, 128, 64, mma_type="fp4xfp4")
    group = types.SimpleNamespace(size=lambda: 2)
    with pytest.raises(PlatformError, match="2 ranks"):
        deep_gemm.SymmBuffer(group, 2, 1, 1, 128, 64)
    alone = types.SimpleNamespace(size=lambda: 1)
    assert deep_gemm.SymmBuffer(alone, 2, 4, 1, 128, 64).x.shape == (4, 128)
