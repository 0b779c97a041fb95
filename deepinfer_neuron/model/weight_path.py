"""Which quantized matrices stay packed, and which are expanded to bf16 once.

A packed matrix is converted inside its region whenever it is used, which takes the vector engine;
an expanded one is read with two bytes per value, which takes memory and its bandwidth. Both run
side by side within a region, so neither all nor none is best: a region is shortest when reading and
converting take equally long. The memory left on a core bounds how far that can be had.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from deepinfer_neuron.platform.simulator.cost import CoreSpec, RegionCost


@dataclass(frozen=True)
class Matrix:
    """A quantized matrix: its name, its values, and its bytes as codes with scales."""

    name: str
    values: int
    packed_bytes: int

    @property
    def expanded_bytes(self) -> int:
        """Bytes in bf16."""
        return 2 * self.values

    @property
    def extra_bytes(self) -> int:
        """Memory that expanding it takes on top."""
        return self.expanded_bytes - self.packed_bytes


@dataclass(frozen=True)
class RegionLoad:
    """One launch of a region: its quantized matrices, and everything else it does.

    Attributes:
        name: of the region.
        matrices: quantized matrices that it reads.
        bytes: read and written besides them.
        flops: of the matrix unit.
        converted_elements: converted besides them, such as cache records.
        passes: of the vector engine per converted element.
    """

    name: str
    matrices: tuple[Matrix, ...]
    bytes: int
    flops: int
    converted_elements: int = 0
    passes: int = 2

    def cost(self, expanded: frozenset[str] | set[str], count: int = 1) -> RegionCost:
        """What a launch costs with these matrices expanded and the others packed."""
        moved, converted = self.bytes, self.converted_elements
        for matrix in self.matrices:
            if matrix.name in expanded:
                moved += matrix.expanded_bytes
            else:
                moved += matrix.packed_bytes
                converted += matrix.values
        return RegionCost(self.name, count, moved, self.flops, converted, self.passes)


@dataclass(frozen=True)
class WeightPath:
    """The choice: names of the expanded matrices, and the memory that takes on top."""

    expanded: frozenset[str]
    extra_bytes: int


def all_packed() -> WeightPath:
    """Nothing expanded."""
    return WeightPath(frozenset(), 0)


def choose_weight_path(regions: Sequence[RegionLoad], memory: int, core: CoreSpec) -> WeightPath:
    """Expand, while memory lasts, whatever saves most time per byte.

    A region's time is convex in what is expanded, so taking the steepest step each time is close to
    the best choice and never worse than none. A step is only taken if it saves time.

    Args:
        regions: launches of a step; a matrix that two of them read has the same name in both.
        memory: bytes that expanded matrices may take on top of the packed ones.
        core: rates.
    """
    chosen: set[str] = set()
    left = memory
    heap: list[tuple[float, int, int]] = []
    for index, region in enumerate(regions):
        _push(heap, index, region, chosen, left, core)
    while heap:
        _, index, place = heapq.heappop(heap)
        matrix = regions[index].matrices[place]
        # Since this entry was made, memory may have run out, or another region chose the matrix.
        if matrix.extra_bytes <= left and matrix.name not in chosen:
            chosen.add(matrix.name)
            left -= max(0, matrix.extra_bytes)
        _push(heap, index, regions[index], chosen, left, core)
    return WeightPath(frozenset(chosen), memory - left)


def _push(
    heap: list[tuple[float, int, int]],
    index: int,
    region: RegionLoad,
    chosen: set[str],
    left: int,
    core: CoreSpec,
) -> None:
    """Put a region's best next step on the heap, if there is one."""
    before = region.cost(chosen).seconds(core)
    best: tuple[float, int] | None = None
    for place, matrix in enumerate(region.matrices):
        if matrix.name in chosen or matrix.extra_bytes > left:
            continue
        saved = before - region.cost(chosen | {matrix.name}).seconds(core)
        gain = saved / max(1, matrix.extra_bytes)
        if saved > 0 and (best is None or gain > best[0]):
            best = (gain, place)
    if best is not None:
        heapq.heappush(heap, (-best[0], index, best[1]))


def total_seconds(regions: Iterable[RegionLoad], expanded: frozenset[str], core: CoreSpec) -> float:
    """Time of all launches, one each."""
    return sum(region.cost(expanded).seconds(core) for region in regions)
