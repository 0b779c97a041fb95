"""Which matrices are expanded: never more than fits, never slower, close to the best choice."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer_neuron.model.weight_path import Matrix, RegionLoad, choose_weight_path
from deepinfer_neuron.platform.simulator.cost import CoreSpec, trn2_core


def core(bandwidth: float, vector: float) -> CoreSpec:
    """A core of which only these two rates matter."""
    return CoreSpec("c", 0, bandwidth, 1e30, 1e30, vector, 0, 0, 0, 0, 0, 1, 0)


def seconds(regions: Iterable[RegionLoad], families: Iterable[str], spec: CoreSpec) -> float:
    """Time of all regions, computed from the definition."""
    chosen, whole = set(families), 0.0
    for region in regions:
        moved, converted = region.bytes, region.converted_elements
        for matrix in region.matrices:
            if matrix.family in chosen:
                moved += 2 * matrix.values
            else:
                moved += matrix.packed_bytes
                converted += matrix.values
        whole += max(moved / spec.bandwidth, converted * region.passes / spec.vector_elements)
    return whole


def extra(regions: Iterable[RegionLoad], families: Iterable[str]) -> int:
    """Memory on top of the packed matrices."""
    chosen = set(families)
    matrices = {m.name: m for r in regions for m in r.matrices if m.family in chosen}
    return sum(2 * m.values - m.packed_bytes for m in matrices.values())


def equal_experts(count: int) -> RegionLoad:
    """A region of 4-bit matrices of 1000 values: 500 bytes packed, 2000 expanded."""
    return RegionLoad(
        "experts",
        tuple(Matrix(f"e{i}", f"e{i}", 1000, 500) for i in range(count)),
        bytes=0,
        flops=0,
    )


def test_reading_and_converting_are_balanced_within_a_region() -> None:
    # 1000 bytes and 1000 passes take a second each. With k of 6 expanded, reading takes
    # 0.5 (6 - k) + 2 k and converting 2 (6 - k): k = 2 gives 6 and 8, k = 3 gives 7.5 and 6.
    path = choose_weight_path([equal_experts(6)], 10**9, core(1000, 1000))
    assert len(path.families) == 3
    assert path.extra_bytes == 3 * 1500


def test_memory_bounds_the_choice() -> None:
    assert choose_weight_path([equal_experts(6)], 1499, core(1000, 1000)).families == frozenset()
    assert len(choose_weight_path([equal_experts(6)], 3000, core(1000, 1000)).families) == 2
    assert choose_weight_path([equal_experts(6)], -5, core(1000, 1000)).extra_bytes == 0


def test_nothing_is_expanded_where_reading_decides() -> None:
    assert choose_weight_path([equal_experts(6)], 10**9, core(100, 10**9)).families == frozenset()


def test_a_matrix_that_two_regions_read_takes_memory_once() -> None:
    shared = Matrix("w", "w", 1000, 1000)
    regions = [RegionLoad(name, (shared,), 0, 0) for name in ("a", "b")]
    path = choose_weight_path(regions, 1000, core(1000, 500))
    assert (path.families, path.extra_bytes) == (frozenset({"w"}), 1000)


def test_layers_of_one_structure_choose_alike() -> None:
    layers = [RegionLoad("l", (Matrix(f"layers.{i}.w", "w", 1000, 1000),), 0, 0) for i in range(4)]
    spec = core(1000, 500)
    assert choose_weight_path(layers, 3999, spec).families == frozenset()
    path = choose_weight_path(layers, 4000, spec)
    assert path.matrices == {f"layers.{i}.w" for i in range(4)}


@st.composite
def small_steps(draw: st.DrawFn) -> list[RegionLoad]:
    """Up to three regions with up to three matrices each, some of one family."""
    regions = []
    for index in range(draw(st.integers(1, 3))):
        matrices = []
        for place in range(draw(st.integers(1, 3))):
            values = draw(st.integers(1, 50)) * 100
            packed = draw(st.sampled_from([values, values // 2]))
            family = draw(st.sampled_from([f"{index}.{place}", f"common.{place}"]))
            matrices.append(Matrix(f"{index}.{place}", family, values, packed))
        regions.append(RegionLoad(f"r{index}", tuple(matrices), draw(st.integers(0, 3000)), 0))
    return regions


@given(small_steps(), st.integers(0, 20_000), st.sampled_from([300.0, 1000.0, 3000.0]))
def test_against_every_possible_choice(
    regions: list[RegionLoad], memory: int, bandwidth: float
) -> None:
    spec = core(bandwidth, 1000.0)
    path = choose_weight_path(regions, memory, spec)
    families = sorted({m.family for r in regions for m in r.matrices})
    choices = [
        chosen
        for size in range(len(families) + 1)
        for chosen in itertools.combinations(families, size)
        if extra(regions, chosen) <= memory
    ]
    packed, best = seconds(regions, (), spec), min(seconds(regions, c, spec) for c in choices)
    found = seconds(regions, path.families, spec)
    assert path.extra_bytes == extra(regions, path.families) <= memory
    assert best - 1e-9 <= found <= packed + 1e-9
    # Greedy in two orders: at least (1 - 1/e) / 2 of the possible gain, usually all of it.
    assert packed - found >= 0.316 * (packed - best) - 1e-9
    assert path == choose_weight_path(regions, memory, spec)


@given(st.integers(1, 8), st.integers(0, 15_000))
def test_equal_matrices_are_chosen_as_well_as_possible(count: int, memory: int) -> None:
    region, spec = equal_experts(count), core(1000, 1000)
    found = choose_weight_path([region], memory, spec).families
    names = [matrix.family for matrix in region.matrices]
    best = min(
        seconds([region], names[:size], spec) for size in range(count + 1) if size * 1500 <= memory
    )
    assert seconds([region], found, spec) == pytest.approx(best)


def test_trainium_prefers_more_than_half_of_the_experts() -> None:
    # 4-bit codes with a scale byte per 32: 0.53 bytes a value. Expanding a share x balances
    # (0.53 + 1.47 x) / 0.725e12 with (1 - x) 2 / 0.4915e12 at x = 0.547: 3.3 of 6 experts.
    experts = RegionLoad(
        "experts",
        tuple(Matrix(f"{i}", f"{i}", 10**6, 10**6 * 17 // 32) for i in range(60)),
        bytes=0,
        flops=0,
    )
    path = choose_weight_path([experts], 10**12, trn2_core())
    assert len(path.families) == pytest.approx(0.547 * 60, abs=1)
