"""Times a step of the backbone by rows when an engine starts, and keeps the result in a file."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import re
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from deepinfer_neuron.engine.budget import StepCurve
from deepinfer_neuron.runner.executor import StepWorker
from deepinfer_neuron.runner.pack import ChunkPlan

_log = logging.getLogger(__name__)

_STAMP = re.compile(r"\.[0-9]{1,12}")
_WARM_UP, _TIMED = 1, 5
_CLOCK_SECONDS = 60
"""How far the clocks of machines that share a directory may differ."""
_GRACE_SECONDS = 2 * 3600
"""Expired files younger than this may still be read by an engine that is starting."""


@dataclass(frozen=True)
class CurveFiles:
    """Where curves are kept between runs.

    Attributes:
        directory: of the files.
        ttl_seconds: age at which a curve is measured again.
    """

    directory: Path
    ttl_seconds: int

    def load(self, key: str, rows: tuple[int, ...]) -> StepCurve | None:
        """The newest curve that was measured with the same key and rows, if it is not too old."""
        for age, path in sorted((self._age(path), path) for path in self._files(key)):
            if age > self.ttl_seconds:
                return None
            if age < -_CLOCK_SECONDS:
                continue
            try:
                read = json.loads(path.read_text())
                times = [float(value) for value in read] if isinstance(read, list) else []
            except (OSError, ValueError, TypeError, OverflowError, RecursionError):
                continue
            if len(times) == len(rows) and all(0 < value < math.inf for value in times):
                return StepCurve(rows, tuple(times))
        return None

    def save(self, key: str, curve: StepCurve) -> None:
        """Keep a curve; removes old ones. A directory that cannot be written is only logged."""
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            name = f"{key}.{uuid.uuid4().hex}.{int(time.time())}"
            temporary = self.directory / f".{name}.tmp"
            temporary.write_text(json.dumps(list(curve.milliseconds)))
            os.replace(temporary, self.directory / name)
            for path in self._files("*"):
                if self._age(path) > self.ttl_seconds + _GRACE_SECONDS:
                    path.unlink(missing_ok=True)
        except OSError as error:
            _log.warning("step times were not kept in %s: %s", self.directory, error)

    def _files(self, key: str) -> list[Path]:
        return [path for path in self.directory.glob(f"{key}.*.*") if _STAMP.fullmatch(path.suffix)]

    def _age(self, path: Path) -> float:
        return time.time() - int(path.suffix[1:])


def curve_key(model: str, rows: tuple[int, ...], weights: str, order: str, threads: int) -> str:
    """Name of everything a curve depends on: model, rows, weights mode, order of sums, threads."""
    facts = {
        "batch_sizes": list(rows),
        "model": model,
        "order": order,
        "parallel": {"cp": 1, "dp": 1, "ep": 1},
        "threads": threads,
        "time_unit": "ms",
        "weights": weights,
    }
    return hashlib.sha256(
        json.dumps(facts, sort_keys=True, separators=(",", ":")).encode()
    ).hexdigest()


def row_counts(most: int) -> tuple[int, ...]:
    """Row counts that are timed: powers of two, then the most a step can have."""
    counts = [1]
    while counts[-1] * 2 < most:
        counts.append(counts[-1] * 2)
    return tuple(dict.fromkeys((*counts, most)))


def measure_curve(worker: StepWorker, rows: tuple[int, ...], num_sequences: int) -> StepCurve:
    """Time steps of different sizes. The caches are written; call it before any request.

    Args:
        worker: with allocated caches.
        rows: ascending; a step's rows are spread over the sequences.
        num_sequences: sequences that the caches have room for.
    """
    times = []
    for count in rows:
        plans = _plans(worker, count, num_sequences)
        samples = []
        for turn in range(_WARM_UP + _TIMED):
            started = time.monotonic()
            worker.hidden(plans)
            if turn >= _WARM_UP:
                samples.append(1000 * (time.monotonic() - started))
        kept = sorted(samples)[1:-1]
        times.append(max(sum(kept) / len(kept), 1e-6))
    return StepCurve(rows, tuple(times))


def _plans(worker: StepWorker, rows: int, num_sequences: int) -> list[ChunkPlan]:
    """``rows`` rows of different tokens, spread over as many sequences as possible."""
    vocabulary = worker.config.vocab_size
    sequences = min(rows, num_sequences)
    plans, place = [], 0
    for slot in range(1, sequences + 1):
        count = rows // sequences + (slot <= rows % sequences)
        tokens = np.arange(place, place + count) * 7919 % vocabulary
        place += count
        codes = worker.compress(tokens.tolist())
        engram_rows = worker.engram_rows([(codes, 0)])
        plans.append(ChunkPlan(tokens, 0, slot, [1], engram_rows, 0))
    return plans
