"""The attention that also normalizes, rotates and casts. It exists so that it can be imported."""

from __future__ import annotations

from typing import NoReturn

from deepinfer_neuron.errors import PlatformError


def _absent(name: str) -> NoReturn:
    raise PlatformError(
        f"fused_norm_rope_attn_rope_cast.{name} is a GPU kernel without a counterpart here; switch "
        "use_fused_norm_rope_attn_rope_cast off."
    )


def prefill(*args: object, **kwargs: object) -> NoReturn:
    """Raises :class:`PlatformError`."""
    _absent("prefill")


def decode(*args: object, **kwargs: object) -> NoReturn:
    """Raises :class:`PlatformError`."""
    _absent("decode")


def permute_q_b_proj(*args: object, **kwargs: object) -> NoReturn:
    """Raises :class:`PlatformError`."""
    _absent("permute_q_b_proj")


def permute_wv_proj(*args: object, **kwargs: object) -> NoReturn:
    """Raises :class:`PlatformError`."""
    _absent("permute_wv_proj")
