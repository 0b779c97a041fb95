"""Engram hashes of tokens, computed on the host."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from deepinfer_neuron.checkpoint.engram import IMAGE, EngramHasher
from deepinfer_neuron.checkpoint.reader import Checkpoint


class TokenHashes:
    """Compressed ids and table rows of a checkpoint's Engram, if it has one."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.hasher = engram_hasher(checkpoint)

    def compress(self, token_ids: Sequence[int]) -> NDArray[np.int32]:
        """Compressed ids of tokens, for the Engram hashes; zeros without Engram."""
        if self.hasher is None:
            return np.zeros(len(token_ids), dtype=np.int32)
        return self.hasher.compress(np.asarray(token_ids, dtype=np.int64))

    def engram_rows(self, histories: Sequence[tuple[NDArray[np.int32], int]]) -> NDArray[np.int64]:
        """Table rows ``[layers, n, columns]`` of the new positions of several sequences.

        Args:
            histories: per sequence, all its compressed ids and its first new position.
        """
        if self.hasher is None:
            count = sum(len(history) - start for history, start in histories)
            return np.empty((0, count, 0), dtype=np.int64)
        windows = [self.hasher.windows(history, start) for history, start in histories]
        images = [history[start:] == IMAGE for history, start in histories]
        return self.hasher.rows(np.concatenate(windows), np.concatenate(images))


def engram_hasher(checkpoint: Checkpoint) -> EngramHasher | None:
    """The hasher of a checkpoint with Engram, else ``None``."""
    if checkpoint.config.engram is None:
        return None
    return EngramHasher.from_config(
        checkpoint.config.engram, checkpoint.directory / "tokenizer.json"
    )
