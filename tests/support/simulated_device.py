"""A simulated Neuron device with small limits, and regions made of plain functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from deepinfer_neuron.platform.regions import RegionModule
from deepinfer_neuron.platform.simulator import (
    Limits,
    Mode,
    SimulatedNeuronPlatform,
    Simulator,
)

SMALL = Limits(
    memory=2**20,
    reserved=0,
    scratch=0,
    step_allocation=2**16,
    dequant=2**10,
    byte_gather=2**10,
    wide_gather=64,
    one_hot=64,
    constant=2**8,
    tiles=8,
    graphs=2,
    groups=1,
    collective=2**10,
    download_bytes=2**8,
    eager=3,
    regions=2,
    load_signatures=5,
)
"""The rules with sizes that a test can break in no time."""


class Device:
    """A new device.

    Args:
        mode: what a violation does.
        limits: sizes behind the rules.
        waived: rules that are not looked at.
    """

    def __init__(
        self,
        mode: Mode = "strict",
        limits: Limits = SMALL,
        waived: frozenset[str] = frozenset(),
    ) -> None:
        self.simulator = Simulator(mode, limits, waived)
        self.platform = SimulatedNeuronPlatform(simulator=self.simulator)
        self.regions = self.platform.make_regions()
        self.module = RegionModule(self.regions)

    def put(self, values: Any, dtype: torch.dtype = torch.float32) -> Tensor:
        """Values, or a tensor, on the device."""
        host = values if isinstance(values, Tensor) else torch.tensor(values, dtype=dtype)
        return host.to("neuron")

    def zeros(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Zeros on the device."""
        return self.put(torch.zeros(shape, dtype=dtype))

    def ints(self, *values: int) -> Tensor:
        """int32 numbers on the device."""
        return self.put(list(values), torch.int32)

    def run(self, body: Callable[..., Any], *args: Any, module: RegionModule | None = None) -> Any:
        """``body(*args)`` as a region; with ``module`` it is ``body(module, *args)``."""
        if module is not None:
            return self.regions.call(module, body, args)

        def region(_: nn.Module, *inner: Any) -> Any:
            return body(*inner)

        return self.regions.call(self.module, region, args)
