"""Run-time settings of the vendor libraries.

Only ``scale_word`` and the two alignments change results; the rest is remembered and returned.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field

import torch

from deepinfer_neuron.errors import ConfigError
from deepinfer_neuron.ops.scale_layout import exponents_per_word

ALIGNMENT = 128
"""Rows to which each expert's rows are aligned, unless set otherwise."""


@dataclass
class Knobs:
    """The settings in force.

    Attributes:
        scale_word: type of packed scale words that are produced: int16 (the default: two
            exponents, columns not padded) or int32 (four exponents, columns padded to 16 bytes).
        row_alignment: alignment of an expert's rows in grouped products.
        token_alignment: the same in the activation between them; the two must agree.
        cores: what ``get_num_sms`` returns.
        early_launch: what was set with ``set_pdl``.
        deterministic: what was set with ``use_deterministic_algorithms``; results always are.
    """

    scale_word: torch.dtype = torch.int16
    row_alignment: int = ALIGNMENT
    token_alignment: int = ALIGNMENT
    cores: int = field(default_factory=lambda: os.cpu_count() or 1)
    early_launch: bool = False
    deterministic: bool = True

    def padded_column(self, rows: int, itemsize: int = 4) -> int:
        """Length of a column of ``rows`` scales of ``itemsize`` bytes."""
        if self.scale_word == torch.int16:
            return rows
        step = 16 // itemsize
        return -(-rows // step) * step

    def per_word(self) -> int:
        """Exponents per word."""
        return exponents_per_word(self.scale_word)


KNOBS = Knobs()
"""The process's settings."""


def checked_alignment(alignment: int) -> int:
    """``alignment`` if rows can be aligned to it.

    Raises :class:`ConfigError` unless it is positive.
    """
    if alignment < 1:
        raise ConfigError(f"expert rows cannot be aligned to {alignment}; use a positive number.")
    return alignment


def set_num_sms(num_sms: int) -> None:
    """Remember a number of cores."""
    KNOBS.cores = num_sms


def get_num_sms() -> int:
    """The number set last, at first the processors of the machine."""
    return KNOBS.cores


def set_pdl(enable: bool) -> None:
    """Remember whether kernels may start early."""
    KNOBS.early_launch = enable


def use_deterministic_algorithms(enable: bool) -> None:
    """Remember the wish; every operator repeats its result bit for bit anyway."""
    KNOBS.deterministic = enable
