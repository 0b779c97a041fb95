"""Index logits: dense, paged, sparse and paged-sparse against loops, and against each other."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from deepinfer_neuron.compat.vendor import deep_gemm
from deepinfer_neuron.compat.vendor.deep_select.interface import topk
from deepinfer_neuron.errors import ConfigError
from tests.compat.vendor_plain import WORDS, Quantized, calc_diff
from tests.ops.number_formats import normal, same_bits, wide

HEADS = 8
PLACEHOLDER = 998244353


def _flat(x: Quantized, word: torch.dtype) -> tuple[Tensor, Tensor]:
    """Data and scales, where the four exponents of an int32 have no axis."""
    codes, scale = x.pair(word)
    return codes, scale[..., 0] if word == torch.int32 else scale


def _weights(count: int, seed: int) -> Tensor:
    """Rows of a stride that is larger than their width."""
    return normal((count, HEADS + 8), seed)[:, :HEADS]


def _score(query: np.ndarray, key: np.ndarray, weight: np.ndarray) -> float:
    return float((np.maximum(query @ key, 0.0) * weight).sum())


class Case:
    """Queries over keys of several sequences that lie one behind the other.

    The first key of a sequence is no multiple of a block.
    """

    lengths = (37, 0, 21, 64)
    rows = ((0, 37), (0, 1), (2, 21), (2, 0), (3, 64), (3, 17), (1, 0))

    def __init__(self, fmt: str, word: torch.dtype, block: int = 8) -> None:
        starts = np.cumsum([3, *self.lengths])[:-1]
        count = int(starts[-1]) + self.lengths[-1]
        self.block, self.word = block, word
        self.keys, self.queries = (
            Quantized((count, 128), 1, fmt),
            Quantized((len(self.rows), HEADS, 128), 2, fmt),
        )
        self.weights = _weights(len(self.rows), 3)
        self.start = [int(starts[sequence]) for sequence, _ in self.rows]
        self.length = [length for _, length in self.rows]
        self.ks = torch.tensor(self.start, dtype=torch.int32)
        self.ke = self.ks + torch.tensor(self.length, dtype=torch.int32)
        self.q, self.kv = _flat(self.queries, word), _flat(self.keys, word)
        self.q_paged = tuple(x[:, None] for x in self.q)

    def exact(self, row: int, key: int) -> float:
        """Score of a key counted from the row's first."""
        weight = wide(self.weights)[row]
        return _score(self.queries.values[row], self.keys.values[self.start[row] + key], weight)

    def dense(self, width: int = 64) -> Tensor:
        return deep_gemm.fp8_fp4_mqa_logits(
            self.q, self.kv, self.weights, self.ks, self.ke, max_seqlen_k=width
        )

    def paged(self, page: int, *, junk: int = -1) -> tuple[Tensor, Tensor]:
        """A cache with a page stride and a storage offset, pages in odd order, and its tables."""
        size = 132 if self.keys.codes.dtype == torch.float8_e4m3fn else 68
        count = sum(-(-length // page) for length in self.lengths) + 2
        raw = torch.full((count * (page * size + 32) + 64,), 0x7F, dtype=torch.uint8)
        cache = raw.as_strided((count, page, 1, size), (page * size + 32, size, size, 1), 64)
        tables = torch.full((len(self.rows), -(-64 // page) + 1), junk, dtype=torch.int32)
        data, free = self.keys.codes.view(torch.uint8), list(range(count))[::-1]
        for sequence in range(len(self.lengths)):
            first = 3 + sum(self.lengths[:sequence])
            for number in range(-(-self.lengths[sequence] // page)):
                where = free.pop()
                rows = [row for row, (owner, _) in enumerate(self.rows) if owner == sequence]
                tables[rows, number] = where
                flat = raw[64 + where * (page * size + 32) :]
                for slot in range(min(page, self.lengths[sequence] - number * page)):
                    key = first + number * page + slot
                    flat[slot * (size - 4) : (slot + 1) * (size - 4)] = data[key]
                    scales = torch.from_numpy(self.keys.exponents[key])
                    flat[page * (size - 4) + 4 * slot :][:4] = scales
        return cache, tables

    def candidates(self, count: int = 4, tail: int = -1) -> Tensor:
        """Ascending blocks of every row, ``tail`` behind those there are."""
        rng = np.random.default_rng(4)
        out = torch.full((len(self.rows), count), tail, dtype=torch.int32)
        for row, length in enumerate(self.length):
            blocks = -(-length // self.block)
            chosen = np.sort(rng.permutation(blocks)[:count])
            out[row, : len(chosen)] = torch.from_numpy(chosen)
        return out

    def valid(self, candidates: Tensor) -> list[tuple[int, int, int]]:
        """(row, column, key) of everything that a sparse form must score."""
        found = []
        for row, length in enumerate(self.length):
            for place in range(min(-(-length // self.block), candidates.shape[1])):
                for offset in range(self.block):
                    key = int(candidates[row, place]) * self.block + offset
                    if key < length:
                        found.append((row, place * self.block + offset, key))
        return found


@pytest.fixture(params=["e4m3", "e2m1"])
def fmt(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(params=WORDS, ids=["int16", "int32"])
def case(request: pytest.FixtureRequest, fmt: str) -> Case:
    return Case(fmt, request.param)


def _close(actual: float, exact: float, case: Case, row: int, key: int) -> bool:
    terms = np.abs(case.queries.values[row]) @ np.abs(case.keys.values[case.start[row] + key])
    slack = float((terms * np.abs(wide(case.weights)[row])).sum()) * 2.0**-20
    return abs(actual - exact) <= abs(exact) * 2.0**-8 + slack


def test_dense(case: Case) -> None:
    out = case.dense()
    assert out.shape == (len(case.rows), 64)
    assert out.dtype == torch.bfloat16
    for row, length in enumerate(case.length):
        for key in range(length):
            assert _close(float(out[row, key]), case.exact(row, key), case, row, key)
    exact = np.array([case.exact(4, key) for key in range(64)])
    assert calc_diff(out[4], exact) < 3e-5


def test_dense_narrower_and_wider(case: Case) -> None:
    out, narrow, wider = case.dense(), case.dense(10), case.dense(200)
    for row, length in enumerate(case.length):
        seen = min(length, 10)
        assert same_bits(narrow[row, :seen], out[row, :seen])
        assert same_bits(wider[row, :length], out[row, :length])


def test_rows_do_not_see_each_other(case: Case) -> None:
    out = case.dense()
    for row, length in enumerate(case.length):
        alone = deep_gemm.fp8_fp4_mqa_logits(
            tuple(x[row : row + 1] for x in case.q),
            case.kv,
            case.weights[row : row + 1],
            case.ks[row : row + 1],
            case.ke[row : row + 1],
            max_seqlen_k=64,
        )
        assert same_bits(alone[0, :length], out[row, :length])


@pytest.mark.parametrize("page", [16, 24])
def test_paged_equals_dense(case: Case, page: int) -> None:
    cache, tables = case.paged(page)
    klen = torch.tensor(case.length, dtype=torch.int32)
    query_indices = torch.tensor([0, 0, 1, PLACEHOLDER, 2, 2, PLACEHOLDER], dtype=torch.int32)
    for plan in ((page, 8), (HEADS,)):
        metadata = deep_gemm.get_paged_mqa_logits_metadata(
            klen[:, None], *plan, indices=query_indices
        )
        out = deep_gemm.fp8_fp4_paged_mqa_logits(
            case.q_paged,
            cache,
            case.weights,
            klen[:, None],
            tables,
            metadata,
            70,
            indices=query_indices,
        )
        assert out.shape == (len(case.rows), 70)
        for row, length in enumerate(case.length):
            assert same_bits(out[row, :length], case.dense()[row, :length])


@pytest.mark.parametrize("tail", [-1, 3, 99999])
def test_sparse_equals_dense(case: Case, tail: int) -> None:
    candidates = case.candidates(tail=tail)
    absolute = candidates + (case.ks // case.block)[:, None]
    for flags in ({}, {"use_unaligned_ks": True}):
        metadata = deep_gemm.get_sparse_mqa_logits_metadata(
            case.ks,
            case.ke,
            case.keys.codes.shape[0],
            absolute,
            case.q[0].dtype,
            case.block,
            **flags,
        )
        out = deep_gemm.fp8_fp4_sparse_mqa_logits(
            case.q, case.kv, case.weights, metadata, 4, case.block, **flags
        )
        assert out.shape == (len(case.rows), 4 * case.block)
        dense = case.dense()
        for row, column, key in case.valid(candidates):
            assert same_bits(out[row, column], dense[row, key])


@pytest.mark.parametrize("tail", [-1, 99999])
def test_paged_sparse_equals_dense(case: Case, tail: int) -> None:
    cache, tables = case.paged(16)
    candidates = case.candidates(tail=tail)
    klen = torch.tensor(case.length, dtype=torch.int32)
    metadata = deep_gemm.get_paged_sparse_mqa_logits_metadata(
        klen, tables, None, 16, candidates, case.q[0].dtype, case.block
    )
    out = deep_gemm.fp8_fp4_paged_sparse_mqa_logits(
        case.q_paged, cache, case.weights, metadata, 4, case.block
    )
    dense = case.dense()
    for row, column, key in case.valid(candidates):
        assert same_bits(out[row, column], dense[row, key])


def test_selection_ignores_what_lies_behind(case: Case) -> None:
    out = case.dense()
    lengths = torch.tensor(case.length, dtype=torch.int32)
    _, expected = topk(out, 6, sorted=False, end=lengths, sorted_index=True, return_value=False)
    for row, length in enumerate(case.length):
        out[row, length::2], out[row, length + 1 :: 2] = math.inf, math.nan
    _, found = topk(out, 6, sorted=False, end=lengths, sorted_index=True, return_value=False)
    assert torch.equal(found, expected)
    assert int((found[1] >= 0).sum()) == 1


def test_no_rows_and_no_keys() -> None:
    q, kv = Quantized((0, HEADS, 128), 1), Quantized((5, 128), 2)
    none = torch.zeros(0, dtype=torch.int32)
    out = deep_gemm.fp8_fp4_mqa_logits(
        q.pair(torch.int16), kv.pair(torch.int16), _weights(0, 3), none, none, max_seqlen_k=4
    )
    assert out.shape == (0, 4)
    q, kv = Quantized((2, HEADS, 128), 1), Quantized((0, 128), 2)
    zero = torch.zeros(2, dtype=torch.int32)
    pair = q.pair(torch.int16), kv.pair(torch.int16)
    assert deep_gemm.fp8_fp4_mqa_logits(
        *pair, _weights(2, 3), zero, zero, max_seqlen_k=0
    ).shape == (2, 0)
    blocks = torch.full((2, 4), -1, dtype=torch.int32)
    metadata = deep_gemm.get_sparse_mqa_logits_metadata(zero, zero, 0, blocks, torch.int8, 8)
    out = deep_gemm.fp8_fp4_sparse_mqa_logits(*pair, _weights(2, 3), metadata, 4, 8)
    assert not out.any()


def test_large_inputs_are_cut_into_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case("e4m3", torch.int16)
    cache, tables = case.paged(16)
    klen = torch.tensor(case.length, dtype=torch.int32)
    whole = deep_gemm.fp8_fp4_paged_mqa_logits(
        case.q_paged, cache, case.weights, klen, tables, None, 64
    )
    monkeypatch.setattr("deepinfer_neuron.compat.vendor.deep_gemm.logits._GATHERED_ELEMENTS", 1)
    monkeypatch.setattr("deepinfer_neuron.ops.index_logits._WORKSPACE_ELEMENTS", 1)
    parts = deep_gemm.fp8_fp4_paged_mqa_logits(
        case.q_paged, cache, case.weights, klen, tables, None, 64
    )
    assert same_bits(parts, whole)
    assert same_bits(case.dense(), whole)


def test_bad_input_is_named() -> None:
    case = Case("e4m3", torch.int16)
    cache, tables = case.paged(16)
    klen = torch.tensor(case.length, dtype=torch.int32)
    with pytest.raises(ConfigError, match="one per query and head"):
        deep_gemm.fp8_fp4_mqa_logits(case.q, case.kv, case.weights[:2], case.ks, case.ke, 4)
    with pytest.raises(ConfigError, match="4 scale bytes"):
        deep_gemm.fp8_fp4_mqa_logits(
            (case.q[0], case.q[1][..., :1]), case.kv, case.weights, case.ks, case.ke, 4
        )
    with pytest.raises(ConfigError, match="100 bytes per token"):
        deep_gemm.fp8_fp4_paged_mqa_logits(
            case.q_paged, cache[..., :100], case.weights, klen, tables, None, 64
        )
    with pytest.raises(ConfigError, match="use_ascend_kv_layout"):
        deep_gemm.fp8_fp4_paged_mqa_logits(
            case.q_paged, cache, case.weights, klen, tables, None, 64, use_ascend_kv_layout=True
        )
    with pytest.raises(ConfigError, match="whole blocks of 8"):
        deep_gemm.get_paged_sparse_mqa_logits_metadata(
            klen, tables, None, 12, case.candidates(), torch.int8, 8
        )
    metadata = deep_gemm.get_sparse_mqa_logits_metadata(
        case.ks, case.ke, 9, case.candidates(), torch.int8, 8
    )
    with pytest.raises(ConfigError, match="for 8 blocks"):
        deep_gemm.fp8_fp4_sparse_mqa_logits(case.q, case.kv, case.weights, metadata, 8, 8)
