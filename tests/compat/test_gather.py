"""Row copies by byte, with zeros outside the table."""

from __future__ import annotations

import pytest
import torch

from deepinfer_neuron.compat.tilelang_ops import gather_tl
from deepinfer_neuron.errors import ConfigError
from tests.compat.guards import Guarded
from tests.ops.number_formats import normal, random_bytes, same_bits


@pytest.mark.parametrize("width", [1, 6, 16, 100])
@pytest.mark.parametrize("gap", [0, 3, 16])
@pytest.mark.parametrize("offset", [0, 2, 4, 5])
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_bytes(width: int, gap: int, offset: int, index_dtype: torch.dtype) -> None:
    """Any alignment of rows, strides and storage."""
    table = random_bytes((11 * (width + gap) + offset,), 1)
    x = table.view(torch.int8)[offset:].as_strided((11, width), (width + gap, 1), offset)
    index = torch.tensor([0, 10, -1, 11, 3, 3, -7, 2**31 - 1], dtype=index_dtype)
    y = Guarded((8, width), (width, 1), torch.int8, offset)
    gather_tl(width, torch.int8, index_dtype, width + gap)(x, index, y.view)
    for row, at in enumerate(index.tolist()):
        expected = x[at] if 0 <= at < 11 else torch.zeros(width, dtype=torch.int8)
        assert torch.equal(y.view[row], expected)
    assert y.intact()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_types(dtype: torch.dtype) -> None:
    x = (normal((20, 9), 1, torch.float32) * 100).to(dtype)
    index = torch.tensor([19, -1, 20, 0, 7])
    y = torch.full((5, 9), 3, dtype=dtype)
    gather_tl(9, dtype, torch.int64, 9)(x, index, y)
    assert same_bits(y[[0, 3, 4]], x[[19, 0, 7]])
    assert not y[1:3].any()


@pytest.mark.parametrize(("n", "m"), [(0, 3), (4, 0), (1, 1)])
def test_small(n: int, m: int) -> None:
    x, y = torch.ones(n, 8, dtype=torch.int8), torch.full((m, 8), 3, dtype=torch.int8)
    gather_tl(8, torch.int8, torch.int32, 8)(x, torch.zeros(m, dtype=torch.int32), y)
    assert (y == min(n, 1)).all()


def test_bad_static_arguments() -> None:
    with pytest.raises(ConfigError):
        gather_tl(8, torch.int8, torch.int16, 8)
