"""Index rows against loops over single entries."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from deepinfer_neuron.compat.tilelang_ops import (
    convert_kv_index_tl,
    expand_swa_index_tl,
    kv_index_cat_tl,
    load_kv_index_tl,
)
from deepinfer_neuron.errors import ConfigError
from tests.compat.guards import guarded_rows, integers

I32 = torch.int32


def wrap(x: int) -> int:
    """An integer as int32 arithmetic leaves it."""
    return (x + 2**31) % 2**32 - 2**31


def plain_range(
    offset: int, length: int, width: int, size: int, table: list[int] | None
) -> list[int]:
    out = []
    for j in range(width):
        p = offset + j
        if j >= length:
            out.append(-1)
        elif table is not None:
            out.append(table[p // size] * size + p % size)
        elif size:
            out.append(offset // size * size + p % size)
        else:
            out.append(p)
    return out


def load(offset_len: Tensor, width: int, size: int, table: Tensor | None) -> Tensor:
    out = guarded_rows(len(offset_len), width, I32)
    load_kv_index_tl(width, size, table is not None)(offset_len, out.view, table)
    assert out.intact()
    return out.view


@pytest.mark.parametrize("size", [0, 1, 64, 133])
@pytest.mark.parametrize("rows", [0, 1, 17])
def test_ranges_and_rings(size: int, rows: int) -> None:
    """Lengths from 0 to beyond the width; offsets up to 2e9; rings of any size."""
    width = 140
    offset_len = torch.stack(
        (integers((rows,), 0, 2 * 10**9, 1), integers((rows,), 0, 2 * width, 2)), dim=1
    )
    if rows > 1:
        offset_len[0, 1], offset_len[1, 1] = 0, width
    expected = [plain_range(o, n, width, size, None) for o, n in offset_len.tolist()]
    assert load(offset_len, width, size, None).tolist() == expected


@pytest.mark.parametrize("size", [1, 32])
@pytest.mark.parametrize("width", [1, 100])
def test_pages(size: int, width: int) -> None:
    """The offset counts tokens of the whole flattened table; lengths beyond the width are cut."""
    rows = 23
    table = integers((400,), 0, 10**6, 3)
    limit = 400 * size
    offsets = integers((rows,), 0, limit, 4)
    lengths = torch.minimum(integers((rows,), 0, 2 * width, 5), limit - offsets)
    offset_len = torch.stack((offsets, lengths), dim=1).to(I32)
    # The last table entry is used by a range that ends with it.
    offset_len[0] = torch.tensor([limit - 1, 1])
    offset_len[1] = torch.tensor([limit - 1, 0])
    expected = [plain_range(o, n, width, size, table.tolist()) for o, n in offset_len.tolist()]
    assert load(offset_len, width, size, table).tolist() == expected


def test_pages_in_several_parts() -> None:
    """More elements than are computed at once."""
    offset_len = torch.stack((torch.arange(3000), torch.full((3000,), 400)), dim=1).to(I32)
    table = torch.arange(100, 0, -1, dtype=I32)
    out = load(offset_len, 500, 64, table)
    p = torch.arange(3000)[:, None] + torch.arange(400)
    assert torch.equal(out[:, :400], (table[p // 64] * 64 + p % 64).to(I32))
    assert (out[:, 400:] == -1).all()


def test_no_table_entries() -> None:
    """Without pages there is nothing to read, whatever the lengths say."""
    offset_len = torch.tensor([[0, 0], [5, 0]], dtype=I32)
    assert (load(offset_len, 4, 16, torch.empty(0, dtype=I32)) == -1).all()


@pytest.mark.parametrize("shape", [(0, 1, 4), (1, 1, 1), (5, 4, 64)])
def test_conversion(shape: tuple[int, int, int]) -> None:
    """The column decides, not the value; context lengths 0, below, at and above k."""
    b, s, k = shape
    size, pages = 16, 9
    tokens = integers(shape, 0, size * pages, 1)
    tables = integers((b, pages), 0, 10**6, 2)
    lengths = integers((b, s), 0, k + 2, 3)
    if b > 2:
        lengths[0], lengths[1], lengths[2] = 0, k, k + 1
    expected = [
        [
            [
                tables[i, x // size].item() * size + x % size if c < lengths[i, j] else -1
                for c, x in enumerate(row)
            ]
            for j, row in enumerate(rows)
        ]
        for i, rows in enumerate(tokens.tolist())
    ]
    convert_kv_index_tl(s, k, pages, size)(tokens, lengths, tables)
    assert tokens.tolist() == expected


def test_conversion_keeps_absent_entries() -> None:
    """-1 inside the context stays -1; garbage behind it is not looked up."""
    tokens = torch.tensor([[[3, -1, 17, 10**9]]], dtype=I32)
    convert_kv_index_tl(1, 4, 2, 16)(tokens, torch.tensor([[3]]), torch.tensor([[5, 7]], dtype=I32))
    assert tokens.tolist() == [[[83, -1, 113, -1]]]


@pytest.mark.parametrize(("rows", "width"), [(0, 128), (1, 1), (33, 127), (5, 1025)])
def test_two_ranges(rows: int, width: int) -> None:
    pivots = torch.stack(
        [
            integers((rows,), -(2**31), 2**31 - 1, 1),
            integers((rows,), 0, width + 2, 2),
            integers((rows,), -(2**31), 2**31 - 1, 3),
            integers((rows,), 0, width, 4),
        ],
        dim=1,
    )
    before = pivots.clone()
    out = guarded_rows(rows, width, I32)
    expand_swa_index_tl(width)(pivots, out.view)
    expected = [
        [wrap(o1 + c) if c < n1 else wrap(o2 - n1 + c) if c < n1 + n2 else -1 for c in range(width)]
        for o1, n1, o2, n2 in pivots.tolist()
    ]
    assert out.view.tolist() == expected
    assert out.intact()
    assert torch.equal(pivots, before)


def test_two_ranges_wrap() -> None:
    """Offsets near 2^31 wrap to negative numbers."""
    pivots = torch.tensor([[2**31 - 3, 5, 2**31 - 1, 2]], dtype=I32)
    out = torch.empty(1, 8, dtype=I32)
    expand_swa_index_tl(8)(pivots, out)
    low = -(2**31)
    assert out.tolist() == [[-low - 3, -low - 2, -low - 1, low, low + 1, -low - 1, low, -1]]


@pytest.mark.parametrize("rows", [0, 1, 19])
def test_concatenation(rows: int) -> None:
    """Only -1 itself stays; the padding columns of the buffer are not touched."""
    window, topk, stride = 8, 13, 24
    near = integers((rows, window), -1, 100, 1)
    far = integers((rows, topk), -3, 5, 2)
    buffer = torch.full((rows, stride), 77, dtype=I32)
    left, right = buffer[:, :window], buffer[:, window : window + topk]
    kv_index_cat_tl("int32", window, topk, stride)(near, far, left, right, 1000, 30)
    assert torch.equal(left, near)
    assert right.tolist() == [[x if x == -1 else x + 1030 for x in row] for row in far.tolist()]
    assert (buffer[:, window + topk :] == 77).all()


def test_bad_static_arguments() -> None:
    for call in (
        lambda: load_kv_index_tl(4, 0, True),
        lambda: load_kv_index_tl(-1, 0, False),
        lambda: convert_kv_index_tl(1, 4, 4, 0),
        lambda: expand_swa_index_tl(-1),
        lambda: kv_index_cat_tl("int64", 4, 4, 8),
        lambda: kv_index_cat_tl("int32", 4, 4, 7),
    ):
        with pytest.raises(ConfigError):
            call()
