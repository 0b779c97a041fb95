"""Mean over streams."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from deepinfer_neuron.compat.tilelang_ops import dflash_input_store_tl
from deepinfer_neuron.errors import ConfigError
from tests.compat.guards import guarded_rows
from tests.ops.number_formats import bf16, normal, same_bits


@pytest.mark.parametrize("rows", [0, 1, 3, 700])
@pytest.mark.parametrize("streams", [1, 3, 4])
def test_mean(rows: int, streams: int) -> None:
    """fp32 sums in order, one rounding; columns beside the output are not touched."""
    x, out = normal((rows, streams, 512), 1), guarded_rows(rows, 512, torch.bfloat16)
    dflash_input_store_tl(512, streams)(x, out.view)
    total = np.zeros((rows, 512), dtype=np.float32)
    for stream in range(streams):
        total = total + x[:, stream].float().numpy()
    expected = torch.from_numpy(bf16(total * np.float32(1 / streams))).to(torch.bfloat16)
    assert same_bits(out.view, expected)
    assert out.intact()


def test_one_stream_is_copied() -> None:
    """Every bit, NaN and the sign of zero included."""
    x = torch.tensor([[[-0.0, torch.nan, 1.0, -torch.inf]]], dtype=torch.bfloat16)
    out = torch.empty(1, 4, dtype=torch.bfloat16)
    dflash_input_store_tl(4, 1)(x, out)
    assert same_bits(out, x[:, 0])


def test_bad_static_arguments() -> None:
    for static in ((0, 4), (512, 0)):
        with pytest.raises(ConfigError):
            dflash_input_store_tl(*static)
