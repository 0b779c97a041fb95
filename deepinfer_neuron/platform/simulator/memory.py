"""Bytes that tensors take on the simulated device."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
from torch import Tensor


class Allocation:
    """One storage on the device: alive as long as a tensor that uses it."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        # Keeps the storage, so that its address names nothing else meanwhile.
        self._storage = storage
        self.bytes = storage.nbytes()


class Ledger:
    """Allocations that are alive, their sum and its peak.

    Args:
        on_allocate: told the bytes of every new allocation, after it was added.
    """

    def __init__(self, on_allocate: Callable[[int], None]) -> None:
        self._on_allocate = on_allocate
        self._alive: weakref.WeakValueDictionary[int, Allocation] = weakref.WeakValueDictionary()
        self.now = 0
        self.peak = 0

    def hold(self, held: Tensor) -> Allocation:
        """The allocation behind ``held``, new if no tensor of the device shares its storage."""
        storage = held.untyped_storage()
        known = self._alive.get(storage._cdata)
        if known is not None:
            return known
        allocation = Allocation(storage)
        self._alive[storage._cdata] = allocation
        weakref.finalize(allocation, self._release, allocation.bytes).atexit = False
        self.now += allocation.bytes
        self.peak = max(self.peak, self.now)
        self._on_allocate(allocation.bytes)
        return allocation

    def _release(self, bytes: int) -> None:
        self.now -= bytes
