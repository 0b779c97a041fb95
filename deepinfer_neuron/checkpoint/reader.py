"""Validated access to the tensors of a checkpoint directory."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType, TracebackType

import numpy as np
import torch
from numpy.typing import NDArray

from deepinfer_neuron.checkpoint.config import load_config
from deepinfer_neuron.checkpoint.config_types import ModelConfig
from deepinfer_neuron.checkpoint.engram import engram_layout
from deepinfer_neuron.checkpoint.fields import printable
from deepinfer_neuron.checkpoint.files import require_directory
from deepinfer_neuron.checkpoint.names import ITEM_BYTES, TensorSpec, canonical_name
from deepinfer_neuron.checkpoint.plan import Placement, Plan, make_plan
from deepinfer_neuron.checkpoint.shard_file import ShardFile
from deepinfer_neuron.errors import CheckpointError, ConfigError

_TORCH_TYPES: Mapping[str, torch.dtype] = {
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F8_E4M3": torch.uint8,
    "F8_E8M0": torch.uint8,
    "I8": torch.uint8,
}

_SCALE_TYPE = "F8_E8M0"
_NAN_SCALE = 255
_ZEROED_SCALE = 0
_MAX_CHECKED_BYTES = 16 * 2**20


class Checkpoint:
    """An open checkpoint: its configuration, its inventory, and its data on demand.

    8-bit and 4-bit codes and scale exponents come as ``torch.uint8``, the rest in its own type.
    A tensor's scale exponents are checked when they are first read: all of them for tensors of up
    to 16 MiB, the rows that are read for larger tables.
    """

    def __init__(self, directory: Path, config: ModelConfig, plan: Plan) -> None:
        self.directory = directory
        self.config = config
        self.specs: Mapping[str, TensorSpec] = MappingProxyType(
            {name: placement.spec for name, placement in plan.placements.items()}
        )
        """Every tensor of the model by name (without ``model.`` prefix)."""
        self.total_bytes = sum(spec.nbytes for spec in self.specs.values())
        """Bytes of all tensors together, headers not counted."""
        self._placements = plan.placements
        self._shards = {
            shard: ShardFile(directory / shard, size) for shard, size in plan.shard_sizes.items()
        }
        self._checked_scales: set[str] = set()

    @classmethod
    def open(cls, directory: str | Path) -> Checkpoint:
        """Validate the configuration, the index and all shard headers of ``directory``.

        No tensor data is read and nothing large is allocated. Raises :class:`ConfigError` for a
        configuration that cannot be served and :class:`CheckpointError` for everything else.
        """
        path = require_directory(directory)
        config = load_config(path)
        _check_table_rows(path, config)
        return cls(path, config, make_plan(path, config))

    def tensor(self, name: str) -> torch.Tensor:
        """The tensor ``name`` mapped from the file: pages are read as they are touched.

        Writing to it changes private memory only. It is copied if its place in the file is not
        aligned for its type. Raises :class:`CheckpointError` for an unknown name, a changed file
        or a damaged scale.
        """
        placement = self._placement(name)
        spec, start = placement.spec, placement.start
        codes = self._shards[placement.shard].window(start, spec.nbytes)
        if start % ITEM_BYTES[spec.dtype]:
            codes = codes.copy()
        self._check_scales(spec, codes)
        return _typed(torch.from_numpy(codes), spec, spec.shape)

    def read(self, name: str) -> torch.Tensor:
        """The tensor ``name`` read into fresh memory of exactly its size.

        Raises :class:`CheckpointError` for an unknown name, a changed or short file, or a damaged
        scale.
        """
        placement = self._placement(name)
        spec = placement.spec
        data = self._shards[placement.shard].read(placement.start, spec.nbytes, spec.name)
        self._check_scales(spec, data.numpy())
        return _typed(data, spec, spec.shape)

    def read_rows(self, name: str, first: int, last: int) -> torch.Tensor:
        """Rows ``first`` up to, not including, ``last`` of a matrix, read in one piece.

        Returns ``[last - first, width]`` in fresh memory, for streaming a table in chunks.
        """
        placement = self._placement(name)
        spec = placement.spec
        rows, row_bytes = _matrix(spec)
        if not 0 <= first <= last <= rows:
            raise CheckpointError(
                f"{self.directory}: rows {first} to {last} of {spec.name} were asked for; "
                f"expected a range within 0 to {rows}."
            )
        data = self._shards[placement.shard].read(
            placement.start + first * row_bytes, (last - first) * row_bytes, spec.name
        )
        self._check_scale_rows(spec, data.numpy())
        return _typed(data, spec, (last - first, spec.shape[1]))

    def rows(self, name: str, index: torch.Tensor) -> torch.Tensor:
        """Rows ``index`` (int64 ``[n]``, any order, repeats allowed) of the matrix ``name``.

        Returns ``[n, width]`` in fresh memory. Only the wanted rows are read.
        Raises :class:`CheckpointError` for an id outside the matrix, a changed file, or a damaged
        scale in one of the rows.
        """
        placement = self._placement(name)
        spec = placement.spec
        rows, row_bytes = _matrix(spec)
        if index.dtype != torch.int64 or index.dim() != 1:
            raise CheckpointError(
                f"{self.directory}: rows of {spec.name} were asked for by {index.dtype} "
                f"{list(index.shape)}; expected row ids as torch.int64 [n]."
            )
        # Sorted distinct rows are read once each and in the order of the file.
        ids, places = np.unique(index.cpu().numpy(), return_inverse=True)
        if ids.size and not 0 <= ids[0] <= ids[-1] < rows:
            wrong = ids[0] if ids[0] < 0 else ids[-1]
            raise CheckpointError(
                f"{self.directory}: row {wrong} of {spec.name} was asked for; expected ids from 0 "
                f"to {rows - 1}."
            )
        picked = self._shards[placement.shard].read_pieces(
            placement.start + ids * row_bytes, row_bytes, spec.name
        )
        self._check_scale_rows(spec, picked)
        data = torch.from_numpy(picked[places].reshape(-1))
        return _typed(data, spec, (index.numel(), spec.shape[1]))

    def close(self) -> None:
        """Close all shards. Tensors that were handed out stay valid."""
        for shard in self._shards.values():
            shard.close()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _placement(self, name: str) -> Placement:
        """Where ``name`` (with or without ``model.`` prefix) lies."""
        placement = self._placements.get(canonical_name(name))
        if placement is None:
            raise CheckpointError(
                f"{self.directory}: the model has no tensor {printable(name)}; expected a name of "
                "its inventory."
            )
        return placement

    def _check_scales(self, spec: TensorSpec, codes: NDArray[np.uint8]) -> None:
        """Check all exponents of a scale tensor once, unless it is a large table."""
        if spec.name in self._checked_scales or spec.nbytes > _MAX_CHECKED_BYTES:
            return
        self._check_scale_rows(spec, codes)
        self._checked_scales.add(spec.name)

    def _check_scale_rows(self, spec: TensorSpec, codes: NDArray[np.uint8]) -> None:
        """Refuse exponent bytes that stand for no number, or for one that no writer produces."""
        if spec.dtype != _SCALE_TYPE:
            return
        for byte, meaning in ((_NAN_SCALE, "not a number"), (_ZEROED_SCALE, "never written")):
            if (codes == byte).any():
                raise CheckpointError(
                    f"{self.directory / self._placements[spec.name].shard}: {spec.name} holds the "
                    f"scale byte {byte}, which is {meaning}; expected 1 to 254, so the file is "
                    "damaged."
                )


def _check_table_rows(directory: Path, config: ModelConfig) -> None:
    """The configured rows of the Engram tables are the sums of their bucket primes."""
    engram = config.engram
    if engram is None:
        return
    layout = engram_layout(
        engram.layer_ids,
        engram.vocab_size,
        engram.max_ngram_size,
        engram.n_heads,
        engram.compressed_vocab_size,
    )
    if tuple(layout.rows) != engram.num_embeddings:
        raise ConfigError(
            f"{directory / 'config.json'}: text_config.engram_num_embeddings is "
            f"{list(engram.num_embeddings)}, but these table rows do not match the prime buckets; "
            f"expected {list(layout.rows)}."
        )


def _matrix(spec: TensorSpec) -> tuple[int, int]:
    """Rows of a matrix and bytes per row."""
    if len(spec.shape) != 2:
        raise CheckpointError(
            f"{spec.name} has the shape {list(spec.shape)}; expected a matrix to take rows from."
        )
    rows, width = spec.shape
    return rows, width * ITEM_BYTES[spec.dtype]


def _typed(data: torch.Tensor, spec: TensorSpec, shape: tuple[int, ...]) -> torch.Tensor:
    """Bytes (uint8, one dimension) as the type that ``spec`` is handed out in."""
    return data.view(_TORCH_TYPES[spec.dtype]).reshape(shape)
