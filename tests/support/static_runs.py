"""Static networks with little around them."""

from __future__ import annotations

import importlib
import pkgutil

from deepinfer_neuron.checkpoint.reader import Checkpoint
from deepinfer_neuron.model import static
from deepinfer_neuron.ops.arithmetic import Arithmetic, graph_arithmetic
from deepinfer_neuron.platform import CpuPlatform
from deepinfer_neuron.platform.regions import RegionBackend, RegionModule, Regions, region
from deepinfer_neuron.runner.buckets import Ladder
from deepinfer_neuron.runner.static_worker import StaticWorker


def static_worker(
    checkpoint: Checkpoint,
    ladder: Ladder,
    backend: RegionBackend | None = None,
    arithmetic: Arithmetic | None = None,
    nextn: int | None = None,
) -> StaticWorker:
    """A worker with caches for a few sequences, its weights as stored.

    Args:
        checkpoint: opened files.
        ladder: shapes of the passes.
        backend: runs regions; plain calls if left out.
        arithmetic: what a device computes if left out.
        nextn: drafts, as many as the ladder has if left out.
    """
    drafts = ladder.nextn if nextn is None else nextn
    worker = StaticWorker(
        checkpoint, graph_arithmetic() if arithmetic is None else arithmetic, CpuPlatform(),
        Regions(backend), ladder, expanded=False, max_length=128 * ladder.widths[-1],
        nextn=drafts, temperatures=(1.0,) * drafts,
    )  # fmt: skip
    worker.allocate(20, 4, 6)
    return worker


def all_regions() -> list[str]:
    """Every method of the static network that is a region, such as ``StaticHead.verify``."""
    launch = region(RegionModule.forward).__code__
    found = []
    for info in pkgutil.iter_modules(static.__path__, f"{static.__name__}."):
        module = importlib.import_module(info.name)
        for cls in vars(module).values():
            if isinstance(cls, type) and cls.__module__ == info.name:
                methods = [n for n, m in vars(cls).items() if _code(m) is launch]
                found += [f"{cls.__name__}.{method}" for method in methods]
    return found


def _code(value: object) -> object:
    return getattr(value, "__code__", None)
