"""Indices of gathers and scatters, checked on their values."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from deepinfer_neuron.platform.simulator.operators import Indexing, is_integer

if TYPE_CHECKING:
    from deepinfer_neuron.platform.simulator.simulator import Simulator


def check_indices(
    simulator: Simulator, indexing: Indexing, detail: str, where: str | None = None
) -> None:
    """Report values that are negative or behind the end.

    Raises:
        DeviceRuleError: there is one and the mode is strict.
    """
    index = indexing.index
    if not isinstance(index, Tensor) or not index.numel():
        return
    if index.dtype == torch.bool or not is_integer(index.dtype):
        return
    least, most = (int(value) for value in torch.aminmax(index))
    if least < 0 or most >= indexing.size:
        simulator.violate(
            "L03", f"{detail} with indices from {least} to {most} of {indexing.size}", where
        )
