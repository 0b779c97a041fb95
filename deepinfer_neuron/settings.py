"""Environment variables, read once into plain typed data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from deepinfer_neuron.errors import ConfigError

WeightsMode = Literal["auto", "packed", "expanded"]
"""How quantized weights are held: as stored, as bf16, or whichever the memory allows."""

WEIGHTS_MODES: tuple[WeightsMode, ...] = get_args(WeightsMode)

_FALSE_WORDS = frozenset({"0", "", "false", "False"})


@dataclass(frozen=True)
class Settings:
    """What the environment says.

    ``batch_invariant`` (``DEEPINFER_BATCH_INVARIANT``, default off): a request's result does not
    depend on what else is in the batch, bit for bit.
    ``weights`` (``DEEPINFER_NEURON_WEIGHTS``, default ``auto``): see :data:`WeightsMode`.
    """

    batch_invariant: bool = False
    weights: WeightsMode = "auto"

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> Settings:
        """Read the settings from ``environ`` (such as ``os.environ``).

        Raises :class:`ConfigError` if a variable holds a value that it does not allow.
        """
        return cls(
            batch_invariant=_flag(environ, "DEEPINFER_BATCH_INVARIANT"),
            weights=_weights(environ, "DEEPINFER_NEURON_WEIGHTS"),
        )


def _flag(environ: Mapping[str, str], name: str) -> bool:
    """Whether the flag ``name`` is on: unset, ``0``, empty, ``false`` and ``False`` mean off."""
    return environ.get(name, "") not in _FALSE_WORDS


def _weights(environ: Mapping[str, str], name: str) -> WeightsMode:
    """The weights mode in ``name``; unset and empty mean ``auto``."""
    value = environ.get(name) or "auto"
    for mode in WEIGHTS_MODES:
        if value == mode:
            return mode
    raise ConfigError(
        f"{name}={value!r} is not a weights mode; set it to one of {', '.join(WEIGHTS_MODES)} "
        "or unset it."
    )
