"""Choices that follow from the platform: arithmetic, and how weights are held."""

from __future__ import annotations

from deepinfer_neuron.errors import ConfigError
from deepinfer_neuron.ops.arithmetic import Arithmetic, FixedOrder, FreeOrder
from deepinfer_neuron.platform import Platform
from deepinfer_neuron.settings import WEIGHTS_MODES, WeightsMode

_EXPAND_BELOW = 0.5
"""Expand weights only if they take less than this share of the available memory."""


def arithmetic_of(platform: Platform, fixed: bool) -> Arithmetic:
    """How a platform computes.

    Raises :class:`ConfigError` for a fixed order on a device without 64-bit floats.
    """
    wide = platform.quirks.float64
    if fixed and not wide:
        raise ConfigError(
            f"batch_invariant needs 64-bit floats, which device {platform.name!r} has not; leave "
            "it out, or use device 'cpu'"
        )
    return Arithmetic(FixedOrder() if fixed else FreeOrder(), graph=platform.graph, wide=wide)


def weights_mode(mode: str, expanded: int, available: int, *, planned: bool) -> WeightsMode:
    """The mode in use; ``"auto"`` stays where a placement decides matrix by matrix.

    Args:
        mode: asked for.
        expanded: bytes of the network with its matrices expanded.
        available: bytes of memory.
        planned: whether a placement decides.

    Raises:
        ConfigError: the mode is not known.
    """
    if mode not in WEIGHTS_MODES:
        raise ConfigError(f"weights is {mode!r}; give one of {', '.join(WEIGHTS_MODES)}")
    if mode == "auto" and planned:
        return "auto"
    if mode == "packed":
        return "packed"
    if mode == "expanded" or expanded <= _EXPAND_BELOW * available:
        return "expanded"
    return "packed"
