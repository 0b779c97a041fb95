"""The performance model, checked with numbers that can be followed by hand."""

from __future__ import annotations

import dataclasses

import pytest

from deepinfer_neuron.platform.simulator.cost import (
    LABEL,
    CollectiveCost,
    CoreSpec,
    Figure,
    HostCost,
    RegionCost,
    calibrate,
    estimate,
    trn2_core,
)

ROUND = CoreSpec(
    name="round numbers",
    hbm_bytes=1000,
    bandwidth=100.0,
    bf16_flops=1000.0,
    fp32_flops=500.0,
    vector_elements=50.0,
    graph_switch=0.25,
    launch=0.5,
    synchronous_idle=2.0,
    eager_operator=0.125,
    collective_latency=1.0,
    link_bandwidth=10.0,
    drain=8.0,
)
"""100 bytes, 1000 flops or 50 converted elements a second."""


@pytest.mark.parametrize(
    ("cost", "seconds", "bound"),
    [
        (RegionCost("r", 1, bytes=300, flops=1000, converted_elements=50), 3.0, "memory"),
        (RegionCost("r", 1, bytes=300, flops=9000, converted_elements=50), 9.0, "compute"),
        (RegionCost("r", 1, bytes=300, flops=1000, converted_elements=100), 4.0, "conversion"),
        (RegionCost("r", 1, bytes=0, flops=0, converted_elements=100, passes=1), 2.0, "conversion"),
    ],
)
def test_the_slowest_engine_decides(cost: RegionCost, seconds: float, bound: str) -> None:
    assert cost.seconds(ROUND) == seconds
    assert cost.bound(ROUND) == bound


def test_an_exchange_costs_latency_and_the_foreign_share_twice() -> None:
    # Of 20 bytes, 3/4 come from other ranks; sent and received: 30 bytes at 10 per second.
    assert CollectiveCost(1, bytes=20, ranks=4).seconds(ROUND) == 1.0 + 3.0
    assert CollectiveCost(1, bytes=20, ranks=1).seconds(ROUND) == 0.0


def test_a_host_that_runs_ahead_is_hidden_behind_the_device() -> None:
    regions = [RegionCost("a", 2, bytes=100, flops=0), RegionCost("b", 1, bytes=400, flops=0)]
    step = estimate(regions, [CollectiveCost(2, 20, 4)], HostCost(eager_operators=4), ROUND)
    assert [(r.name, r.count, r.seconds) for r in step.regions] == [("a", 2, 2.0), ("b", 1, 4.0)]
    assert step.graph_switch == 3 * 0.25
    assert step.collectives == 2 * 4.0
    assert step.device == 6.0 + 0.75 + 8.0
    assert step.host == 3 * 0.5 + 4 * 0.125
    assert (step.hidden_host, step.total) == (2.0, 14.75)
    assert (step.launches, step.label) == (3, LABEL)


def test_a_host_that_is_slower_than_the_device_decides() -> None:
    step = estimate([RegionCost("a", 1, 100, 0)], [], HostCost(python=5.0), ROUND)
    assert (step.device, step.host, step.total) == (1.25, 5.5, 5.5)


def test_waiting_for_every_region_adds_host_and_idle_time() -> None:
    host = HostCost(eager_operators=8, drains=1, synchronous=True)
    step = estimate([RegionCost("a", 3, 100, 0)], [], host, ROUND)
    assert (step.host, step.idle, step.drains) == (1.0, 6.0, 8.0)
    assert step.total == 3.0 + 0.75 + 1.0 + 6.0 + 8.0


def test_calibration_splits_a_reported_time() -> None:
    figure = Figure("f", 10.0, (RegionCost("a", 1, 375, 0),), (), HostCost())
    (found,) = calibrate([figure], ROUND)
    assert (found.explained, found.unexplained) == (4.0, 6.0)


def test_the_core_has_the_published_rates() -> None:
    core = trn2_core()
    # A chip of 96 GiB, 2.9 TB/s, 667 and 181 TFLOPS is four logical cores.
    assert core.hbm_bytes * 4 == 96 * 2**30
    assert core.bandwidth * 4 == pytest.approx(2.9e12)
    assert core.bf16_flops * 4 == pytest.approx(667e12)
    assert core.fp32_flops * 4 == pytest.approx(181e12)
    assert core.vector_elements == pytest.approx(491.5e9, rel=1e-4)
    assert 20e-6 <= core.graph_switch <= 100e-6
    assert dataclasses.replace(core, bandwidth=0.58e12) == trn2_core(0.58e12)


def test_converting_every_weight_of_a_step_takes_65_milliseconds() -> None:
    cost = RegionCost("all", 1, bytes=0, flops=0, converted_elements=16_100_000_000, passes=2)
    assert cost.seconds(trn2_core()) == pytest.approx(0.065, abs=0.001)
