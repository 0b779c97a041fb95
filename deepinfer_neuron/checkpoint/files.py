"""Opening the files of a checkpoint directory without trusting them."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

from deepinfer_neuron.checkpoint.fields import describe
from deepinfer_neuron.errors import CheckpointError


def require_directory(directory: str | Path) -> Path:
    """``directory`` as a path, or :class:`CheckpointError` if it is not a readable directory."""
    path = Path(directory)
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{path}: cannot open the checkpoint directory ({reason(error)}); "
            "give the directory that holds config.json."
        ) from error
    if not stat.S_ISDIR(mode):
        raise CheckpointError(
            f"{path}: not a directory; give the directory that holds config.json."
        )
    return path


def reason(error: Exception) -> str:
    """The operating system's words for a failed file operation."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error)


def regular_file_size(path: Path) -> int:
    """Size in bytes of a regular file (symbolic links are followed).

    Raises :class:`CheckpointError` for anything else, since opening a pipe would block.
    """
    try:
        status = os.stat(path)
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{path}: cannot open the file ({reason(error)}); a checkpoint must hold it."
        ) from error
    if not stat.S_ISREG(status.st_mode):
        raise CheckpointError(f"{path}: not a regular file; a checkpoint must hold one here.")
    return status.st_size


def read_small_file(path: Path, limit: int) -> bytes:
    """The whole of a file of at most ``limit`` bytes."""
    size = regular_file_size(path)
    if size > limit:
        raise CheckpointError(f"{path}: has {size} bytes; expected at most {limit}.")
    try:
        with path.open("rb") as file:
            return file.read(limit)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot read the file ({reason(error)}).") from error


def parse_json(data: bytes, where: str, *, unique: bool = False) -> object:
    """The JSON value in UTF-8 ``data``; ``where`` names the file in errors.

    With ``unique`` a key may appear only once per object; otherwise its last value counts. Raises
    :class:`CheckpointError` for anything that is not JSON, not UTF-8, or nested too deeply.
    """
    try:
        return json.loads(data.decode("utf-8"), object_pairs_hook=_unique_pairs if unique else None)
    except RecursionError as error:
        raise CheckpointError(f"{where}: the JSON text is nested too deeply.") from error
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{where}: not UTF-8 text (byte {error.start}).") from error
    except ValueError as error:
        detail = str(error)[:160]
        raise CheckpointError(f"{where}: not valid JSON ({detail}).") from error


def _unique_pairs(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """An object without repeated keys; ``ValueError`` names the first repetition."""
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"the name {describe(key)} appears twice")
            seen.add(key)
    return result
