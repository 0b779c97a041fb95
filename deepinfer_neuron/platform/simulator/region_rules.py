"""Rules about what goes into a region and comes out of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from deepinfer_neuron.platform.regions import RegionKey, tensors_of
from deepinfer_neuron.platform.simulator.device import DeviceTensor
from deepinfer_neuron.platform.simulator.operators import describe_tensor

if TYPE_CHECKING:
    from deepinfer_neuron.platform.simulator.simulator import Simulator

_WIDE = frozenset({torch.int64, torch.uint64, torch.float64})


def check_inputs(
    simulator: Simulator, key: RegionKey, module: nn.Module, args: tuple[Any, ...]
) -> None:
    """Check the arguments of a region and the tensors of its module.

    Raises:
        DeviceRuleError: a rule is broken and the mode is strict.
    """
    arguments = list(tensors_of(args))
    for value in args:
        if isinstance(value, bool | int | float):
            simulator.violate("G14", f"{key} given {value!r}")
    for tensor in arguments:
        _check_tensor(simulator, f"{key} given", tensor)
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        _check_tensor(simulator, f"{key} with {name}", tensor)
    if getattr(module, "rows_pow2", False) and arguments and arguments[0].dim():
        rows = arguments[0].shape[0]
        if rows & (rows - 1):
            simulator.violate("G08", f"{key} with {rows} rows, {describe_tensor(arguments[0])}")


def check_outputs(simulator: Simulator, key: RegionKey, out: Any) -> None:
    """Check the results of a region, which are still CPU tensors.

    Raises:
        DeviceRuleError: a rule is broken and the mode is strict.
    """
    for tensor in tensors_of(out):
        if tensor.dtype in _WIDE:
            simulator.violate("G16", f"{key} returns {describe_tensor(tensor)}")
        if tensor.numel() == 0:
            simulator.violate("L06", f"{key} returns {describe_tensor(tensor)}")


def _check_tensor(simulator: Simulator, what: str, tensor: Tensor) -> None:
    shape = describe_tensor(tensor)
    if not isinstance(tensor, DeviceTensor):
        simulator.violate("G15", f"{what} {shape} on {tensor.device}")
    if not tensor.is_contiguous():
        simulator.violate("G13", f"{what} {shape} with strides {tensor.stride()}")
    if tensor.dtype in _WIDE:
        simulator.violate("G16", f"{what} {shape}")
    if tensor.numel() == 0:
        simulator.violate("L06", f"{what} {shape}")
