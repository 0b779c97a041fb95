"""The simulated device: tensors, modules, regions, counts, memory, and what is around it."""

from __future__ import annotations

import copy
import gc
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deepinfer_neuron.errors import DeviceRuleError, PlatformError
from deepinfer_neuron.platform import get_platform
from deepinfer_neuron.platform.regions import RegionModule, Regions, region
from deepinfer_neuron.platform.simulator import (
    DeviceTensor,
    Limits,
    SimulatedNeuronPlatform,
    Simulator,
)
from tests.support.simulated_device import Device

ROOT = Path(__file__).parents[2]


@pytest.fixture
def device() -> Device:
    """A strict device with the limits of trn2."""
    return Device(limits=Limits())


@pytest.fixture
def lenient() -> Device:
    """A device that collects."""
    return Device("warn", Limits())


# Tensors.


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize(
    ("make", "values"),
    [
        (lambda: torch.tensor([1.0, 2.0], device="neuron"), [1, 2]),
        (lambda: torch.as_tensor([1.0, 2.0], device="neuron"), [1, 2]),
        (lambda: torch.tensor(3, dtype=torch.int32, device="neuron"), 3),
        (lambda: torch.zeros(2, device="neuron"), [0, 0]),
        (lambda: torch.ones(2, device="neuron:0"), [1, 1]),
        (lambda: torch.full((2,), 3.0, device="neuron"), [3, 3]),
        (lambda: torch.arange(3, dtype=torch.int32, device="neuron"), [0, 1, 2]),
        (lambda: torch.ones(2).to("neuron"), [1, 1]),
        (lambda: torch.ones(2).to("neuron", non_blocking=True), [1, 1]),
        (lambda: torch.zeros_like(torch.ones(2, device="neuron")), [0, 0]),
        (lambda: torch.ones(2, device="neuron").new_zeros(1), [0]),
        (lambda: torch.ones(2).neuron(), [1, 1]),  # type: ignore[attr-defined]
    ],
)
def test_factories_and_copies_make_tensors_of_the_device(make: Any, values: Any) -> None:
    tensor = make()
    assert isinstance(tensor, DeviceTensor)
    assert tensor.device == torch.device("neuron", 0)
    assert tensor.tolist() == values
    host = tensor.cpu()
    assert type(host) is Tensor
    assert host.tolist() == values


@pytest.mark.usefixtures("device")
def test_a_default_device_is_obeyed() -> None:
    with torch.device("neuron"):
        assert torch.zeros(2).device.type == "neuron"
        assert torch.tensor([1.0]).device.type == "neuron"
        assert torch.zeros(2, device="cpu").device.type == "cpu"


def test_views_share_memory(device: Device) -> None:
    x = device.zeros(4, 3)
    x.view(12)[3:6].add_(device.put([1.0, 2.0, 3.0]))
    x[0] = 5.0
    x[2].copy_(device.put([7.0, 8.0, 9.0]))
    assert x.tolist() == [[5, 5, 5], [1, 2, 3], [7, 8, 9], [0, 0, 0]]
    assert x.view(torch.int32).shape == (4, 3)
    assert not x.t().is_contiguous()
    assert device.simulator.memory.now >= 48


def test_an_operator_that_writes_returns_what_it_was_given(device: Device) -> None:
    x, y = device.zeros(2), device.put([1.0, 2.0])
    assert x.add_(y) is x
    assert torch.add(y, y, out=x) is x
    assert x.tolist() == [2, 4]


def test_several_results_stay_on_the_device(lenient: Device) -> None:
    values, indices = lenient.put([3.0, 1.0, 2.0]).topk(2)
    assert (values.device.type, indices.device.type) == ("neuron", "neuron")
    assert (values.tolist(), indices.tolist()) == ([3, 2], [0, 2])
    assert [part.tolist() for part in lenient.put([1.0, 2.0]).split(1)] == [[1], [2]]


def test_values_can_be_read(device: Device) -> None:
    x = device.put([1.5, 0.0])
    assert x[0].item() == 1.5
    assert not x[1]
    assert int(device.ints(7)) == 7
    assert torch.equal(x, x)
    assert "1.5" in repr(x)
    assert device.simulator.counts.downloads == 4


def test_embedding_and_linear_compute_what_the_host_computes(device: Device) -> None:
    weight, ids = torch.randn(8, 4), torch.tensor([3, 0, 3], dtype=torch.int32)
    on_device = F.embedding(device.put(ids), device.put(weight))
    assert torch.equal(on_device.cpu(), F.embedding(ids, weight))
    x = torch.randn(2, 4)
    assert torch.equal(F.linear(device.put(x), device.put(weight)).cpu(), F.linear(x, weight))


def test_inference_mode_makes_no_difference(device: Device) -> None:
    x = device.zeros(2, 2)
    with torch.inference_mode():
        y = x.view(4) + device.put([1.0])
        z = torch.zeros(2, device="neuron")
        x.add_(device.put([2.0]))
    y.add_(device.put([1.0]))
    z.add_(device.put([1.0]))
    assert (x.tolist(), y.tolist(), z.tolist()) == ([[2, 2], [2, 2]], [2] * 4, [1, 1])


def test_modules_move_and_compute(device: Device) -> None:
    module = nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3)).eval().requires_grad_(False)
    module.register_buffer("rank", torch.zeros(1, dtype=torch.int32))
    moved = copy.deepcopy(module).to("neuron")
    assert isinstance(moved[0].weight, nn.Parameter)
    assert {p.device.type for p in (*moved.parameters(), *moved.buffers())} == {"neuron"}
    x = torch.randn(2, 4)
    assert torch.equal(moved(device.put(x)).cpu(), module(x))


def test_host_and_device_do_not_mix(device: Device) -> None:
    with pytest.raises(PlatformError, match="mixes tensors of the host and of the device"):
        device.zeros(2) + torch.zeros(2)
    with pytest.raises(PlatformError, match="cannot change the shape"):
        device.zeros(2).unsqueeze_(0)


def test_the_platform_copies_and_never_casts(device: Device) -> None:
    platform = device.platform
    assert platform.device == torch.device("neuron", 0)
    assert platform.to_device(torch.ones(2, 3).t()).is_contiguous()
    buffer = platform.to_device(torch.zeros(3, dtype=torch.int32))
    platform.upload(torch.arange(3, dtype=torch.int32), buffer)
    assert platform.download(buffer).tolist() == [0, 1, 2]
    with pytest.raises(PlatformError, match="shapes and dtypes"):
        platform.upload(torch.zeros(3), buffer)
    with pytest.raises(PlatformError, match="at most 32 bits"):
        platform.to_device(torch.zeros(2, dtype=torch.float64))
    platform.synchronize()


# Regions.


class Block(RegionModule):
    """A layer with a cache that it writes, a submodule, and a region within a region."""

    def __init__(self, regions: Regions) -> None:
        super().__init__(regions)
        self.register_buffer("cache", torch.zeros(8, 4))
        self.norm = nn.LayerNorm(4)
        self.bias = torch.ones(4)

    @region
    def forward(self, x: Tensor, at: Tensor) -> tuple[Tensor, Tensor | None]:
        self.cache.index_copy_(0, at.long(), x)
        return self.doubled(self.norm(x) + self.bias), None

    @region
    def doubled(self, x: Tensor) -> Tensor:
        return x + x


@torch.no_grad()
def test_regions_compute_what_the_host_computes_and_caches_change_in_place(
    device: Device,
) -> None:
    x, at = torch.randn(2, 4), torch.tensor([5, 1], dtype=torch.int32)
    plain = Block(Regions())
    expected, _ = plain(x, at)
    block = Block(device.regions).to("neuron")
    block.bias = device.put(block.bias)
    out, nothing = block(device.put(x), device.put(at))
    assert torch.equal(out.cpu(), expected)
    assert nothing is None
    assert torch.equal(block.cache.cpu(), plain.cache)


def test_layers_of_one_kind_share_a_graph_and_new_weights_are_seen(device: Device) -> None:
    blocks = [Block(device.regions).to("neuron") for _ in range(3)]
    for block in blocks:
        block.bias = device.put([1.0] * 4)
    x, at = device.zeros(2, 4), device.ints(0, 1)
    for block in blocks:
        block(x, at)
    assert device.simulator.counts.graphs == 1
    assert len(device.regions.records) == 1
    blocks[0].bias = device.put([3.0] * 4)
    assert blocks[0](x, at)[0][0].tolist() == [6] * 4
    blocks[1].bias.copy_(device.put([4.0] * 4))
    assert blocks[1](x, at)[0][0].tolist() == [8] * 4
    assert device.simulator.counts.graphs == 1


def test_cache_views_of_a_pool_are_written_through(device: Device) -> None:
    def write(cache: Tensor, at: Tensor, rows: Tensor) -> None:
        cache.index_put_((at,), rows)

    pool = device.zeros(3, 4, 2)
    device.run(write, pool[1], device.ints(2), device.put([[1.0, 2.0]]))
    assert pool[1].tolist() == [[0, 0], [0, 0], [1, 2], [0, 0]]
    assert pool[0].cpu().count_nonzero() == 0


def test_a_result_that_is_a_view_of_an_input_shares_its_memory(device: Device) -> None:
    x = device.zeros(2, 2)
    before = device.simulator.memory.now
    flat = device.run(lambda x: x.view(4), x)
    assert device.simulator.memory.now == before
    flat.add_(device.put([1.0]))
    assert x.tolist() == [[1, 1], [1, 1]]


class Pair(NamedTuple):
    """Two tensors that go together."""

    first: Tensor
    second: Tensor


def test_named_tuples_go_in_and_come_out(device: Device) -> None:
    pair = Pair(device.zeros(2), device.put([1.0, 2.0]))
    out = device.run(lambda pair: Pair(pair.second, pair.first + pair.second), pair)
    assert isinstance(out, Pair)
    assert out.second.device.type == "neuron"
    assert out.second.tolist() == [1, 2]


class Scaled(RegionModule):
    """A module with a Python number."""

    factor = 2.0

    @region
    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


def test_a_changed_attribute_is_seen(device: Device) -> None:
    module, x = Scaled(device.regions), device.put([1.0])
    assert module(x).tolist() == [2]
    module.factor = 3.0
    with pytest.raises(DeviceRuleError, match="G04"):
        module(x)


def test_kinds_of_one_structure_may_share_a_graph_after_warmup(device: Device) -> None:
    modules = [Scaled(device.regions), Scaled(device.regions)]
    modules[1].region_kind = "other"
    x = device.put([1.0])
    for module in modules:
        module(x)
    device.regions.seal()
    for module in modules:
        module(x)
    assert len(device.regions.records) == 2
    assert device.regions.compiled_late == 0


def test_integers_that_only_index_are_allowed(device: Device) -> None:
    def pick(x: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
        values, order = x.topk(2, -1)
        best = order[:, 0].to(torch.int32)
        at = torch.arange(2)
        return table[order.flatten()] + values.view(-1, 1), torch.where(at == order, best, 0)

    out, best = device.run(pick, device.put([[1.0, 3.0, 2.0]]), device.zeros(3, 1))
    assert out.flatten().tolist() == [3, 2]
    assert best.dtype == torch.int32


def test_graphs_are_described(device: Device) -> None:
    device.run(
        lambda x, w: x @ w.to(torch.bfloat16),
        device.zeros(4, 256, dtype=torch.bfloat16),
        device.zeros(256, 1024, dtype=torch.int8),
    )
    (graph,) = device.simulator.report().graphs
    size = graph.size
    assert (size.nodes, size.tiles, size.converted) == (2, 4, 256 * 1024)
    assert size.flops == 2 * 4 * 256 * 1024
    assert (size.input_bytes, size.output_bytes) == (4 * 256 * 2 + 256 * 1024, 4 * 1024 * 2)
    assert size.temporary_bytes == 256 * 1024 * 2 + 4 * 1024 * 2
    assert device.simulator.counts.converted == 256 * 1024
    assert device.simulator.counts.flops == size.flops


def test_regions_can_be_run_operator_by_operator() -> None:
    platform = SimulatedNeuronPlatform("off", Simulator("warn"))
    block = Block(platform.make_regions())
    block.bias = block.bias.to("neuron")
    block.to("neuron")
    x = torch.ones(1, 4, device="neuron")
    block(x, torch.zeros(1, dtype=torch.int32, device="neuron"))
    assert platform.simulator.counts.regions == 0
    assert platform.simulator.counts.eager > 3


# Counts.


def test_a_step_counts_what_it_did_and_nothing_else(device: Device) -> None:
    meta, cache = device.zeros(4, dtype=torch.int32), device.zeros(8, 2)
    block = Block(device.regions).to("neuron")
    block.bias = device.put([1.0] * 4)
    x = device.zeros(4, 4)
    block(x, meta)
    device.simulator.begin_step("decode")
    device.platform.upload(torch.arange(4, dtype=torch.int32), meta)
    out, _ = block(x, meta)
    rows = F.embedding(meta, cache)
    device.platform.download(out)
    step = device.simulator.end_step()
    counts = step.counts
    assert step.label == "decode"
    assert (counts.uploads, counts.upload_bytes) == (1, 16)
    assert (counts.downloads, counts.download_bytes) == (1, 64)
    assert (counts.blocking, counts.graphs, counts.collectives) == (0, 0, 0)
    assert (counts.regions, counts.by_region) == (1, {"Block.forward": 1})
    assert (counts.eager, counts.by_operator) == (1, {"embedding": 1})
    assert step.sequence[0].startswith("Block.forward")
    assert step.memory_peak >= step.memory > 0
    assert step.to_dict()["counts"]["uploads"] == 1
    assert rows.shape == (4, 2)
    assert device.simulator.report().steps == 1


def test_steps_begin_and_end_in_turn(device: Device) -> None:
    simulator = device.simulator
    with pytest.raises(PlatformError, match="not begun"):
        simulator.end_step()
    simulator.begin_step()
    with pytest.raises(PlatformError, match="within another"):
        simulator.begin_step()
    simulator.abandon_step()
    with pytest.raises(DeviceRuleError, match="H01"), simulator.step():
        device.zeros(1).item()
    with simulator.step("after a failure"):
        pass
    assert simulator.report().steps == 1


def test_a_step_over_its_limits_is_reported_all_the_same(device: Device) -> None:
    buffer = device.zeros(2)
    device.simulator.begin_step()
    for _ in range(2):
        device.platform.upload(torch.zeros(2), buffer)
    with pytest.raises(DeviceRuleError, match="2 uploads in a step, 1 allowed"):
        device.simulator.end_step()
    step = device.simulator.report().last_step
    assert step is not None
    assert [violation.rule for violation in step.violations] == ["H01"]
    assert not device.simulator.in_step


def test_memory_is_that_of_storages_that_are_alive(device: Device) -> None:
    memory = device.simulator.memory
    start = memory.now
    x = device.zeros(1024)
    assert memory.now == start + 4096
    view = x[:10].view(2, 5)
    assert memory.now == start + 4096
    y = x + x
    assert device.platform.available_memory_bytes() == Limits().usable - memory.now
    del x, y
    gc.collect()
    assert memory.now == start + 4096
    del view
    gc.collect()
    assert memory.now == start
    assert memory.peak >= start + 8192
    assert device.platform.total_memory_bytes() == 24 * 2**30


def test_two_devices_keep_their_own_accounts() -> None:
    first = Device()
    x = first.zeros(4)
    second = Device()
    x.add_(x)
    y = second.zeros(4)
    assert first.simulator.counts.by_operator == {"add": 1}
    assert second.simulator.memory.now == y.untyped_storage().nbytes()


# Around the device.


def test_the_platform_is_found_by_name() -> None:
    platform = get_platform("neuron", simulate=True)
    assert isinstance(platform, SimulatedNeuronPlatform)
    assert platform.name == "neuron"
    assert platform.graph
    assert platform.collectives_backend == "gloo"
    assert platform.compile_backend is None
    assert get_platform("cpu", simulate=True).name == "cpu"


def test_it_is_not_taken_for_hardware() -> None:
    code = """
from deepinfer_neuron.platform import get_platform
get_platform("neuron", simulate=True)
from deepinfer_neuron.compat import transfer_to_neuron
print(transfer_to_neuron.find_target().type)
"""
    assert _run(code) == "cpu\n"


def test_it_gives_way_to_a_real_device() -> None:
    code = """
import sys, types
sys.modules["torch_neuronx"] = types.ModuleType("torch_neuronx")
from deepinfer_neuron.errors import PlatformError
from deepinfer_neuron.platform import get_platform
try:
    get_platform("neuron", simulate=True)
except PlatformError as error:
    print(error)
"""
    assert "torch_neuronx is present" in _run(code)


def test_nothing_is_registered_without_it() -> None:
    code = """
import torch
from deepinfer_neuron.platform import get_platform
get_platform("cpu", compile="regions")
print(torch._C._get_privateuse1_backend_name())
"""
    assert _run(code) == "privateuseone\n"


def _run(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
