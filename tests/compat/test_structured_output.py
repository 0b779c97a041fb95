"""The bit mask factory against a loop."""

from __future__ import annotations

import math
import random

import pytest
import torch

from deepinfer_neuron.compat.tilelang_ops import structured_output
from deepinfer_neuron.errors import ConfigError

FACTORY = structured_output.apply_token_bitmask_by_step_inplace_tl
LENGTHS = [1, 3, 4, 1, 2]


@pytest.mark.parametrize("step", [0, 1, 2])
@pytest.mark.parametrize("has_ftp", [True, False])
@pytest.mark.parametrize("indices", [[], [2], [4, 0, 2], [0, 1, 2, 3, 4]])
@pytest.mark.parametrize("width", [64, 8256])
def test_mask(width: int, indices: list[int], has_ftp: bool, step: int) -> None:
    source = random.Random(width)
    starts = [sum(LENGTHS[:i]) for i in range(5)]
    wide = torch.randn(sum(LENGTHS), width + 11, generator=torch.Generator().manual_seed(step))
    expected = wide.clone()
    words = [[source.randrange(-(2**31), 2**31) for _ in range(width // 32)] for _ in range(5)]
    bitmask = torch.zeros(5, width // 32 + 3, dtype=torch.int32)  # rows apart
    bitmask[:, : width // 32] = torch.tensor(words, dtype=torch.int32)
    for request in indices:
        row = request
        if has_ftp:
            row = starts[request] + step
            if step >= LENGTHS[request]:
                continue
        for token in range(width):
            if not words[request][token // 32] >> (token % 32) & 1:
                expected[row, 5 + token] = -math.inf
    FACTORY(width, has_ftp)(
        wide[:, 5 : 5 + width],
        bitmask[:, : width // 32],
        torch.tensor(indices, dtype=torch.int32),
        torch.tensor(starts, dtype=torch.int32) if has_ftp else None,
        step,
    )
    assert torch.equal(wide, expected)


def test_tokens_behind_the_mask_stay() -> None:
    logits = torch.zeros(1, 96)
    bitmask = torch.tensor([[0, 1]], dtype=torch.int32)
    FACTORY(64, False)(logits, bitmask, torch.tensor([0]), None, 0)
    assert logits[0].isfinite().nonzero().flatten().tolist() == [32, *range(64, 96)]


def test_kernels_are_made_once_and_senseless_sizes_are_refused() -> None:
    assert FACTORY(64, True) is FACTORY(64, True)
    with pytest.raises(ConfigError):
        FACTORY(0, True)
