"""Regions compiled for a CPU."""

from __future__ import annotations

import shutil

import pytest
import torch
from torch import Tensor

from deepinfer_neuron.platform import CpuPlatform
from deepinfer_neuron.platform.regions import RegionModule, Regions, region

pytestmark = [
    # What inductor imports is not this project's to mend.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler"),
]


class Rounds(RegionModule):
    """Rounds to bf16 between operators that a compiler would fuse."""

    @region
    def twice(self, x: Tensor, y: Tensor) -> Tensor:
        first = (x.to(torch.float32) * y).to(torch.bfloat16)
        second = (first.to(torch.float32) * 3.3).to(torch.bfloat16)
        return (second.to(torch.float32) - first.to(torch.float32)).to(torch.bfloat16)


def test_a_compiled_region_rounds_where_the_plain_one_does() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4096, generator=generator).to(torch.bfloat16)
    y = torch.randn(4096, generator=generator)
    compiled = CpuPlatform("regions").make_regions()
    expected = Rounds(Regions()).twice(x, y)
    assert torch.equal(Rounds(compiled).twice(x, y), expected)
    assert [str(record.key) for record in compiled.records] == ["Rounds.twice"]
