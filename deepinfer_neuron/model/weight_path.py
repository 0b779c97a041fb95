"""Which quantized matrices stay packed, and which are expanded to bf16 once.

A packed matrix is converted inside its region whenever it is used, which takes the vector engine;
an expanded one is read with two bytes per value, which takes memory and its bandwidth. Both run
side by side within a region, so neither all nor none is best: a region is shortest when reading and
converting take equally long. The memory left on a core bounds how far that can be had.

Layers of one structure share their graphs, and a graph is made for packed or for expanded weights.
So the choice falls for a *family*: the matrices with the same place in all layers of one structure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from deepinfer_neuron.platform.simulator.cost import CoreSpec, RegionCost


@dataclass(frozen=True)
class Matrix:
    """A quantized matrix.

    Attributes:
        name: of the one matrix; regions that read the same one name it equally.
        family: matrices that are expanded together.
        values: elements.
        packed_bytes: codes and scales.
    """

    name: str
    family: str
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

    def cost(self, families: frozenset[str] = frozenset()) -> RegionCost:
        """What a launch costs with these families expanded and the other matrices packed."""
        moved, converted = self.bytes, self.converted_elements
        for matrix in self.matrices:
            if matrix.family in families:
                moved += matrix.expanded_bytes
            else:
                moved += matrix.packed_bytes
                converted += matrix.values
        return RegionCost(self.name, 1, moved, self.flops, converted, self.passes)


@dataclass(frozen=True)
class WeightPath:
    """The choice.

    Attributes:
        families: expanded ones.
        matrices: names of all matrices in them.
        extra_bytes: memory that takes on top of the packed matrices.
    """

    families: frozenset[str]
    matrices: frozenset[str]
    extra_bytes: int


def choose_weight_path(regions: Sequence[RegionLoad], memory: int, core: CoreSpec) -> WeightPath:
    """Expand, while memory lasts, the families that save most time.

    A region's time is convex in what is expanded, so taking the steepest step each time is close to
    the best choice: steepest per byte, or, where a few large matrices compete for the last bytes,
    steepest at all; whichever ends faster. A step is only taken if it saves time, so the result is
    never slower than with all matrices packed.

    Args:
        regions: launches of a step.
        memory: bytes that expanded matrices may take on top of the packed ones.
        core: rates.
    """
    members = _members(regions)
    extra = {
        family: sum(matrix.extra_bytes for matrix in matrices.values())
        for family, matrices in members.items()
    }
    readers = _readers(regions)
    ways = [_climb(extra, readers, memory, core, per_byte=way) for way in (True, False)]
    gains = [gain for _, gain in ways]
    chosen = ways[gains.index(max(gains))][0]
    names = frozenset(name for family in chosen for name in members[family])
    return WeightPath(chosen, names, sum(extra[family] for family in chosen))


def _climb(
    extra: Mapping[str, int],
    readers: Mapping[str, Sequence[tuple[RegionLoad, int]]],
    memory: int,
    core: CoreSpec,
    *,
    per_byte: bool,
) -> tuple[frozenset[str], float]:
    """Families chosen one by one, and the seconds they save."""
    chosen: frozenset[str] = frozenset()
    left, gain = memory, 0.0
    while True:
        best, most, saves = "", 0.0, 0.0
        for family, size in extra.items():
            if family in chosen or size > left:
                continue
            saved = _saved(readers[family], chosen, family, core)
            merit = saved / max(1, size) if per_byte else saved
            if merit > most:
                best, most, saves = family, merit, saved
        if not best:
            return chosen, gain
        chosen |= {best}
        left -= extra[best]
        gain += saves


def _readers(regions: Iterable[RegionLoad]) -> dict[str, list[tuple[RegionLoad, int]]]:
    """Regions that read a family; those that cost the same stand once, with their number."""
    regions = list(regions)
    alike = Counter(map(_structure, regions))
    readers: dict[str, list[tuple[RegionLoad, int]]] = {}
    for structure, region in {_structure(region): region for region in regions}.items():
        for family in dict.fromkeys(matrix.family for matrix in region.matrices):
            readers.setdefault(family, []).append((region, alike[structure]))
    return readers


def _members(regions: Iterable[RegionLoad]) -> Mapping[str, dict[str, Matrix]]:
    """Matrices by family and name, each once, in order of first appearance."""
    members: dict[str, dict[str, Matrix]] = {}
    for region in regions:
        for matrix in region.matrices:
            members.setdefault(matrix.family, {})[matrix.name] = matrix
    return members


def _structure(region: RegionLoad) -> tuple[object, ...]:
    """Equal for regions that cost the same whatever is expanded."""
    matrices = tuple((m.family, m.values, m.packed_bytes) for m in region.matrices)
    other = (region.bytes, region.flops, region.converted_elements, region.passes)
    return (matrices, *other)


def _saved(
    readers: Iterable[tuple[RegionLoad, int]], chosen: frozenset[str], family: str, core: CoreSpec
) -> float:
    """Seconds that expanding one more family saves."""
    more = chosen | {family}
    return sum(
        count * (region.cost(chosen).seconds(core) - region.cost(more).seconds(core))
        for region, count in readers
    )
