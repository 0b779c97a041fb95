"""Rules about collectives and about several ranks, on a pretended job of eight."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from deepinfer_neuron.errors import DeviceRuleError, PlatformError
from deepinfer_neuron.platform.simulator import (
    SimulatorReport,
    StepReport,
    compare_graphs,
    compare_steps,
)
from tests.support.rule_snippets import Pair, Snippet, double, in_region, in_step, ints, zeros
from tests.support.simulated_device import Device


@pytest.fixture
def eight_ranks() -> Iterator[None]:
    """A process group whose collectives do nothing."""
    dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def _sum(x: Tensor, group: Any = None) -> Tensor:
    return functional.all_reduce(x, "sum", group or dist.group.WORLD)


def _exchange(sizes: list[int] | None) -> Snippet:
    def body(x: Tensor) -> Tensor:
        return functional.all_to_all_single(x, sizes, sizes, dist.group.WORLD)

    return in_region(body, zeros(8, 2))


def _summed_by(ranks: list[int]) -> Snippet:
    def snippet(d: Device) -> None:
        group = dist.new_group(ranks)
        d.run(lambda x: _sum(x, group), d.zeros(4))

    return snippet


def _summed_by_groups(count: int) -> Snippet:
    def snippet(d: Device) -> None:
        groups = [dist.new_group([0, 1, 2, 3]) for _ in range(count)]
        d.run(lambda x: sum(_sum(x, group) for group in groups), d.zeros(4))

    return snippet


def _reduced(d: Device) -> None:
    dist.all_reduce(d.zeros(4))


def _sent(d: Device) -> None:
    dist.send(d.zeros(4), 1)


def _broadcast(d: Device) -> None:
    dist.broadcast(d.zeros(4), 0)


def _reduced_asynchronously(d: Device) -> None:
    dist.all_reduce(d.zeros(4), async_op=True)


COLLECTIVES: dict[str, Pair] = {
    "C02": (_broadcast, _reduced),
    "C03": (_exchange([1, 1, 1, 1, 1, 1, 0, 2]), _exchange(None)),
    "C04": (_sent, _reduced),
    "C05": (_summed_by([0, 1, 2]), _summed_by([0, 1, 2, 3])),
    "C07": (_reduced_asynchronously, _reduced),
    "C10": (in_step(dist.all_reduce, zeros(4)), in_region(_sum, zeros(4))),
    "D05": (in_region(_sum, ints(1, 2)), in_region(lambda x: _sum(x.float()), ints(1, 2))),
    "G20": (_summed_by_groups(2), _summed_by_groups(1)),
    "M07": (in_region(_sum, zeros(257)), in_region(_sum, zeros(256))),
}


@pytest.mark.usefixtures("eight_ranks")
@pytest.mark.parametrize("name", COLLECTIVES)
def test_a_rule_of_collectives(name: str) -> None:
    bad, good = COLLECTIVES[name]
    with pytest.raises(DeviceRuleError) as caught:
        bad(Device())
    assert caught.value.rule == name
    good(Device())


@pytest.mark.usefixtures("eight_ranks")
def test_collectives_are_counted_and_leave_results_on_the_device() -> None:
    device = Device()
    x = device.zeros(4)
    dist.all_reduce(x)
    out = device.run(_sum, x)
    assert out.device.type == "neuron"
    assert device.simulator.counts.collectives == 2


# Several ranks, side by side.


def _rank(rows: int, body: Callable[..., Tensor] = double) -> Device:
    device = Device()
    x = device.zeros(rows)
    with device.simulator.step():
        device.run(body, x, module=device.module)
    return device


def _step(device: Device) -> StepReport:
    step = device.simulator.report().last_step
    assert step is not None
    return step


def test_ranks_must_launch_the_same_regions() -> None:
    compare_steps([_step(_rank(4)), _step(_rank(4))])
    with pytest.raises(DeviceRuleError, match=r"G19.*rank 0 has .*\(4,\).* rank 1 has .*\(8,\)"):
        compare_steps([_step(_rank(4)), _step(_rank(8))])


@pytest.mark.usefixtures("eight_ranks")
def test_ranks_must_run_the_same_collectives() -> None:
    steps = []
    for collectives in (1, 1, 0):
        device = Device(waived=frozenset({"C10"}))
        x = device.zeros(4)
        with device.simulator.step():
            for _ in range(collectives):
                dist.all_reduce(x)
        steps.append(_step(device))
    compare_steps(steps[:2])
    with pytest.raises(DeviceRuleError, match=r"C08.*rank 2 has nothing"):
        compare_steps(steps)


def test_ranks_must_capture_the_same_graphs() -> None:
    def reports(bodies: list[Callable[..., Tensor]]) -> list[SimulatorReport]:
        return [_rank(4, body).simulator.report() for body in bodies]

    def made(rank: int) -> Callable[..., Tensor]:
        def body(module: nn.Module, x: Tensor) -> Tensor:
            return x + rank

        return body

    compare_graphs(reports([double, double]))
    with pytest.raises(DeviceRuleError, match=r"G05.*on ranks 0 and 1"):
        compare_graphs(reports([made(0), made(1)]))


def test_comparing_nothing_is_an_error() -> None:
    for compare in (compare_steps, compare_graphs):
        with pytest.raises(PlatformError, match="no reports"):
            compare([])
