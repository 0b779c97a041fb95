"""Where the sections of paged records lie, and which rows segments name."""

from __future__ import annotations

import torch

from deepinfer_neuron.ops.kv_pages import page_sections, segment_rows, write_rows


def test_sections() -> None:
    """Byte addresses of two pages of three records (4 + 2 bytes), 20 bytes apart, from byte 3."""
    memory = torch.arange(50, dtype=torch.uint8)
    pages = memory.as_strided((2, 3, 6), (20, 6, 1), 3)
    data, scale = page_sections(pages, 4, 2, interleaved=True)
    assert data[1, 2].tolist() == [35, 36, 37, 38]
    assert scale[1, 2].tolist() == [39, 40]
    data, scale = page_sections(pages, 4, 2, interleaved=False)
    assert data[1, 2].tolist() == [31, 32, 33, 34]
    assert scale[1, 2].tolist() == [39, 40]
    assert scale[0, 0].tolist() == [15, 16]


def test_writes() -> None:
    section = torch.zeros(2, 3, 2)
    write_rows(section, torch.tensor([4, 2]), torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    assert section[1, 1].tolist() == [1, 2]
    assert section[0, 2].tolist() == [3, 4]
    assert section.count_nonzero() == 4


def test_segments() -> None:
    """Empty and reversed segments name no rows."""
    table = [[5, 1, 3, 10], [7, 2, 2, 0], [-1, 0, 2, 4], [3, 4, 1, 0]]
    block, row, out = segment_rows(torch.tensor(table, dtype=torch.int32))
    assert block.tolist() == [5, 5, -1, -1]
    assert row.tolist() == [1, 2, 0, 1]
    assert out.tolist() == [10, 11, 4, 5]
    assert [part.tolist() for part in segment_rows(torch.empty(0, 4, dtype=torch.int32))] == [
        []
    ] * 3
