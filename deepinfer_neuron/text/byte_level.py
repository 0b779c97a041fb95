"""The byte-level alphabet: how a vocabulary spelling stands for raw bytes.

A byte-level BPE vocabulary is written with 256 printable symbols, one per byte, so that it can
be stored as ordinary text. Bytes that are printable in Latin-1 stand for themselves; the other
68 take the code points from 256 upwards, in byte order.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final


def _alphabet() -> dict[str, int]:
    """Maps each symbol to its byte."""
    own = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(256)) - set(own))
    return {chr(byte): byte for byte in own} | {
        chr(256 + rank): byte for rank, byte in enumerate(others)
    }


BYTE_OF_SYMBOL: Final[Mapping[str, int]] = MappingProxyType(_alphabet())
"""The 256 symbols of the alphabet and the byte each of them stands for."""


def spelling_bytes(spelling: str) -> bytes:
    """Bytes that a vocabulary spelling contributes to decoded text.

    A spelling outside the alphabet, as added tokens have it, is taken literally as UTF-8.
    """
    try:
        return bytes(map(BYTE_OF_SYMBOL.__getitem__, spelling))
    except KeyError:
        return spelling.encode("utf-8")
