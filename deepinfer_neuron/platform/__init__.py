"""The device that runs the model."""

from __future__ import annotations

from deepinfer_neuron.errors import PlatformError
from deepinfer_neuron.platform.base import Download, Platform, Quirks, check_compile_mode
from deepinfer_neuron.platform.cpu import CpuPlatform
from deepinfer_neuron.platform.neuron import NeuronPlatform

__all__ = ["CpuPlatform", "Download", "NeuronPlatform", "Platform", "Quirks", "get_platform"]


def get_platform(name: str, *, compile: str | None = None, simulate: bool = False) -> Platform:
    """The platform called ``name``.

    Args:
        name: ``"cpu"`` or ``"neuron"``.
        compile: ``"off"`` for plain calls, ``"regions"`` for one graph per region; by default
            ``"off"`` on the CPU and ``"regions"`` on the Neuron device.
        simulate: the simulated Neuron device instead of a chip; nothing else for the CPU.

    Raises:
        PlatformError: ``name`` or ``compile`` is not known, or the Neuron device is not usable on
            this machine.
    """
    if name == "cpu":
        return CpuPlatform(check_compile_mode(compile or "off"))
    if name != "neuron":
        raise PlatformError(f"device {name!r} is not known; use device 'cpu' or 'neuron'.")
    mode = check_compile_mode(compile or "regions")
    if simulate:
        # Only who simulates pays for the compiler front end that this imports.
        from deepinfer_neuron.platform.simulator import SimulatedNeuronPlatform

        return SimulatedNeuronPlatform(mode)
    return NeuronPlatform.open(mode)
