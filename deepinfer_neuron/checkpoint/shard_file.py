"""Access to the data of one shard whose header has been validated."""

from __future__ import annotations

import mmap
import os
import sys
import threading
import weakref
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from deepinfer_neuron.checkpoint.files import reason
from deepinfer_neuron.errors import CheckpointError

# Private writable mappings of shards larger than the memory are refused by Linux unless they ask
# for no reservation. Older Python versions have no name for this flag.
_MAP_NORESERVE = 0x4000 if sys.platform == "linux" else 0


class ShardFile:
    """One shard, opened at the first access and kept open until :meth:`close`.

    ``size`` is the file size at the time the header was read. Every access checks it again, so a
    file that was cut or replaced since then is reported instead of crashing the process. All
    methods raise :class:`CheckpointError` and may be called from several threads.
    """

    def __init__(self, path: Path, size: int) -> None:
        self._path = path
        self._size = size
        self._lock = threading.Lock()
        self._descriptor: int | None = None
        self._closer: weakref.finalize[[int], ShardFile] | None = None
        self._closed = False
        self._mapped: NDArray[np.uint8] | None = None

    def read(self, start: int, count: int, name: str) -> torch.Tensor:
        """``count`` bytes from ``start`` on in fresh memory, uint8 ``[count]``.

        ``name`` is the tensor they belong to, for errors.
        """
        descriptor = self._open()
        data = torch.empty(count, dtype=torch.uint8)
        view = data.numpy().data
        done = 0
        while done < count:
            try:
                step = os.preadv(descriptor, [view[done:]], start + done)
            except OSError as error:
                raise CheckpointError(
                    f"{self._path}: cannot read {name} ({reason(error)})."
                ) from error
            if step == 0:
                raise CheckpointError(
                    f"{self._path}: short read of {name}, got {done} of {count} bytes; "
                    "the file was cut while it was in use."
                )
            done += step
        return data

    def read_pieces(self, starts: NDArray[np.int64], count: int, name: str) -> NDArray[np.uint8]:
        """``count`` bytes from each of ``starts`` on, as uint8 ``[len(starts), count]``.

        Small plain reads: unlike a mapping they leave no pages of the file behind in the memory of
        this process, however long it runs and however large the file is.
        """
        descriptor = self._open()
        try:
            pieces = [os.pread(descriptor, count, start) for start in starts.tolist()]
        except OSError as error:
            raise CheckpointError(f"{self._path}: cannot read {name} ({reason(error)}).") from error
        data = bytearray().join(pieces)
        if len(data) != count * len(pieces):
            raise CheckpointError(
                f"{self._path}: short read of {name}, got {len(data)} of {count * len(pieces)} "
                "bytes; the file was cut while it was in use."
            )
        return np.frombuffer(data, dtype=np.uint8).reshape(len(pieces), count)

    def window(self, start: int, count: int) -> NDArray[np.uint8]:
        """``count`` bytes from ``start`` on, mapped from the file without copying them.

        Writing to the result changes private memory, never the file.
        """
        descriptor = self._open()
        with self._lock:
            if self._mapped is None:
                self._mapped = self._map(descriptor)
            return self._mapped[start : start + count]

    def close(self) -> None:
        """Close the file; memory that was handed out stays valid."""
        with self._lock:
            self._closed = True
            self._descriptor = None
            self._mapped = None
            if self._closer is not None:
                self._closer()

    def _open(self) -> int:
        """The descriptor of the open file, after checking that its size is the planned one."""
        with self._lock:
            if self._closed:
                raise CheckpointError(f"{self._path}: the checkpoint is closed; open it again.")
            try:
                if self._descriptor is None:
                    descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
                    self._closer = weakref.finalize(self, os.close, descriptor)
                    self._descriptor = descriptor
                size = os.fstat(self._descriptor).st_size
            except OSError as error:
                raise CheckpointError(
                    f"{self._path}: cannot open the shard ({reason(error)})."
                ) from error
            if size != self._size:
                raise CheckpointError(
                    f"{self._path}: has {size} bytes but had {self._size} when its header was "
                    "read; shards must not change while they are in use."
                )
            return self._descriptor

    def _map(self, descriptor: int) -> NDArray[np.uint8]:
        """A private mapping of the whole file as uint8 ``[size]``."""
        try:
            memory = mmap.mmap(
                descriptor,
                self._size,
                flags=mmap.MAP_PRIVATE | _MAP_NORESERVE,
                prot=mmap.PROT_READ | mmap.PROT_WRITE,
            )
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"{self._path}: cannot map the shard into memory ({reason(error)})."
            ) from error
        return np.frombuffer(memory, dtype=np.uint8)
