"""The device that runs the model."""

from __future__ import annotations

from deepinfer_neuron.errors import PlatformError
from deepinfer_neuron.platform.base import Platform
from deepinfer_neuron.platform.cpu import CpuPlatform

__all__ = ["CpuPlatform", "Platform", "get_platform"]


def get_platform(name: str) -> Platform:
    """The platform called ``name``.

    Raises :class:`PlatformError` for ``"neuron"``, which this version does not drive, and for any
    name that is not a platform.
    """
    if name == "cpu":
        return CpuPlatform()
    if name == "neuron":
        raise PlatformError(
            "device 'neuron' is not available in this version of deepinfer-neuron, which runs on "
            "the CPU only; use device 'cpu'."
        )
    raise PlatformError(f"device {name!r} is not known; use device 'cpu'.")
