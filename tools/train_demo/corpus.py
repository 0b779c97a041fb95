"""From documents to training batches: tokenizer, token stream, batches by number."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Regex, Tokenizer, pre_tokenizers
from torch import Tensor

from deepinfer_neuron.checkpoint.tiny_tokenizer import PRETOKEN_PATTERNS, write_tokenizer

BOS, EOS = 0, 1


def piece_counts(texts: Iterable[str]) -> dict[str, int]:
    """How often every pre-token occurs in texts."""
    splits = [pre_tokenizers.Split(Regex(x), "isolated") for x in PRETOKEN_PATTERNS]
    cutter = pre_tokenizers.Sequence(splits)
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(piece for piece, _ in cutter.pre_tokenize_str(text))
    return dict(counts)


def train_tokenizer(
    directory: Path, vocab_size: int, max_length: int, texts: Iterable[str]
) -> Path:
    """Write a tokenizer of exactly ``vocab_size`` ids whose merges come from texts."""
    directory.mkdir(parents=True, exist_ok=True)
    return write_tokenizer(directory, vocab_size, max_length, piece_counts(texts))


def encode(tokenizer: Tokenizer, texts: Sequence[str]) -> list[list[int]]:
    """Token ids of texts, without sentence tokens."""
    return [
        encoding.ids for encoding in tokenizer.encode_batch(list(texts), add_special_tokens=False)
    ]


def stream(documents: Sequence[Sequence[int]]) -> NDArray[np.int32]:
    """All documents in a row, each between its sentence tokens."""
    return np.concatenate([np.array([BOS, *ids, EOS], dtype=np.int32) for ids in documents])


def batch(
    tokens: NDArray[np.int32], first: int, sequences: int, context: int, seed: int
) -> tuple[Tensor, Tensor]:
    """Sequences number ``first`` and following of an endless shuffled run over a stream.

    Every epoch cuts the stream at another phase and takes the pieces in another order. A sequence
    is the sentence start and a piece; its targets are the tokens that follow.

    Returns:
        ids and targets, int64 ``[sequences, context]``.
    """
    pieces = len(tokens) // context - 1
    rows = []
    for number in range(first, first + sequences):
        epoch, place = divmod(number, pieces)
        generator = np.random.default_rng([seed, context, epoch])
        phase = int(generator.integers(context))
        at = phase + int(_order(generator, pieces, (seed, context, epoch))[place]) * context
        rows.append(tokens[at : at + context])
    targets = torch.from_numpy(np.stack(rows).astype(np.int64))
    ids = torch.cat((torch.full((sequences, 1), BOS), targets[:, :-1]), 1)
    # A piece that begins with a sentence start of its own needs no second one to be learned.
    targets[:, 0] = torch.where(targets[:, 0] == BOS, -1, targets[:, 0])
    return ids, targets


_ORDERS: dict[tuple[int, int, int], NDArray[np.int64]] = {}


def _order(
    generator: np.random.Generator, pieces: int, key: tuple[int, int, int]
) -> NDArray[np.int64]:
    if key not in _ORDERS:
        if len(_ORDERS) > 4:
            _ORDERS.clear()
        _ORDERS[key] = generator.permutation(pieces)
    return _ORDERS[key]
