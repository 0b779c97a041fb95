"""``torch.cuda`` and ``device="cuda"`` land on the host or on the Neuron device, and back."""

from __future__ import annotations

import importlib
import subprocess
import sys
import threading
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from deepinfer_neuron.errors import PlatformError

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
NAME = "deepinfer_neuron.compat.transfer_to_neuron"


def _attributes() -> dict[tuple[str, str], Any]:
    context = importlib.import_module("torch.utils._device").DeviceContext
    owners = {
        "torch": torch,
        "cuda": torch.cuda,
        "graphs": torch.cuda.graphs,
        "context": context,
        "thread": threading.Thread,
        "tensor": torch.Tensor,
        "module": torch.nn.Module,
    }
    return {
        (owner, name): value
        for owner, place in owners.items()
        for name, value in vars(place).items()
    }


@pytest.fixture
def transfer() -> Iterator[types.ModuleType]:
    module = importlib.import_module(NAME)
    module.uninstall()
    module.install(module.Target("cpu"))
    try:
        yield module
    finally:
        module.uninstall()


def _run(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={"PYTHONPATH": f"{ROOT}:{ROOT / 'tests' / 'compat'}", "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


FACTORIES: dict[str, tuple[Any, ...]] = {
    "empty": (2,),
    "zeros": (2,),
    "ones": (2,),
    "full": ((2,), 1.0),
    "rand": (2,),
    "randn": (2,),
    "randint": (0, 5, (2,)),
    "randperm": (3,),
    "arange": (3,),
    "linspace": (0, 1, 3),
    "logspace": (0, 1, 3),
    "eye": (2,),
    "tensor": ([1, 2],),
    "as_tensor": ([1, 2],),
    "asarray": ([1, 2],),
    "scalar_tensor": (1.0,),
    "empty_strided": ((2,), (1,)),
    "empty_permuted": ((2, 3), (1, 0)),
    "tril_indices": (3, 3),
    "triu_indices": (3, 3),
    "hann_window": (4,),
}
LIKE = ("zeros_like", "ones_like", "empty_like", "rand_like", "randn_like")


@pytest.mark.parametrize("name", FACTORIES)
def test_factories(transfer: types.ModuleType, name: str) -> None:
    factory, arguments = getattr(torch, name), FACTORIES[name]
    for device in ("cuda", "cuda:1", torch.device("cuda"), torch.device("cuda", 3), 0, "cpu", None):
        assert factory(*arguments, device=device).device == CPU
    assert factory(*arguments).device == CPU
    with torch.device("cuda"):
        assert factory(*arguments).device == CPU
        assert factory(*arguments, device="cuda:0").device == CPU
    with torch.device("meta"):
        assert factory(*arguments).device.type == "meta"


def test_other_ways_to_make_tensors(transfer: types.ModuleType) -> None:
    x = torch.ones(2)
    for name in LIKE:
        assert getattr(torch, name)(x, device="cuda").device == CPU
    assert torch.full_like(x, 2, device="cuda").device == CPU
    assert torch.randint_like(x, 5, device="cuda").device == CPU
    for made in (x.new_zeros(3, device="cuda"), x.new_tensor([1.0], device="cuda")):
        assert made.device == CPU
    assert torch.zeros(2, device="meta").device.type == "meta"
    assert torch.zeros(2, pin_memory=True).pin_memory().device == CPU


def test_default_device(transfer: types.ModuleType) -> None:
    with torch.device("cuda:1"), torch.device("cuda"):
        assert torch.get_default_device() == CPU
        assert torch.nn.Linear(2, 2).weight.device == CPU
    torch.set_default_device("cuda")
    try:
        assert torch.zeros(1).device == CPU
    finally:
        torch.set_default_device(None)


def test_moving_tensors(transfer: types.ModuleType) -> None:
    x = torch.arange(4, dtype=torch.float32)
    for moved in (
        x.cuda(),
        x.cuda(1),
        x.cuda("cuda:0", non_blocking=True),
        x.to("cuda"),
        x.to("cuda:2", non_blocking=True),
        x.to(torch.device("cuda")),
        x.to(0),
        x.to(device="cuda"),
    ):
        assert moved.device == CPU
        assert torch.equal(moved, x)
    assert x.to("cuda", torch.int32).dtype == torch.int32
    assert x.to(torch.float64).dtype == torch.float64
    assert x.to(torch.zeros(1, dtype=torch.bfloat16)).dtype == torch.bfloat16
    assert x.to("meta").device.type == "meta"
    assert x.record_stream(torch.cuda.current_stream()) is None


def test_moving_modules(transfer: types.ModuleType) -> None:
    for module in (
        torch.nn.Linear(2, 3, device="cuda"),
        torch.nn.Linear(2, 3).cuda(),
        torch.nn.Linear(2, 3).cuda(1),
        torch.nn.Linear(2, 3).to("cuda"),
        torch.nn.Linear(2, 3).to(device="cuda:0", dtype=torch.float64),
    ):
        assert {p.device for p in module.parameters()} == {CPU}


def test_generator(transfer: types.ModuleType) -> None:
    plain = torch.Generator().manual_seed(3)
    made = torch.Generator(device="cuda").manual_seed(3)
    assert isinstance(plain, torch.Generator)
    assert isinstance(torch.default_generator, torch.Generator)
    assert made.device == CPU
    assert torch.equal(
        torch.randn(5, generator=made, device="cuda"), torch.randn(5, generator=plain)
    )


@pytest.mark.parametrize(
    "seed", [torch.manual_seed, "manual_seed", "manual_seed_all"], ids=["torch", "one", "all"]
)
def test_seeding_ends(transfer: types.ModuleType, seed: Any) -> None:
    state = torch.get_rng_state()
    try:
        expected = torch.randn(3, generator=torch.Generator().manual_seed(11))
        (getattr(torch.cuda, seed) if isinstance(seed, str) else seed)(11)
        assert torch.equal(torch.randn(3, device="cuda"), expected)
        assert torch.cuda.initial_seed() == 11
        kept = torch.cuda.get_rng_state()
        first = torch.rand(2)
        torch.cuda.set_rng_state(kept)
        assert torch.equal(torch.rand(2), first)
        torch.cuda.seed()
        torch.cuda.seed_all()
    finally:
        torch.set_rng_state(state)


def test_streams(transfer: types.ModuleType) -> None:
    outer = torch.cuda.current_stream()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        assert torch.cuda.current_stream() is side
        with torch.cuda.stream(None), torch.cuda.default_stream():
            assert torch.cuda.current_stream() is torch.cuda.default_stream()
        assert torch.cuda.current_stream() is side
    assert torch.cuda.current_stream() is outer
    side.wait_stream(outer)
    side.wait_event(outer.record_event())
    side.synchronize()
    assert side.query()
    assert not torch.cuda.is_current_stream_capturing()
    assert not torch.cuda.graphs.is_current_stream_capturing()
    with torch.cuda.device(0), torch.cuda.device_of(torch.ones(1)):
        torch.cuda.synchronize("cuda:0")


def test_events(transfer: types.ModuleType) -> None:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with pytest.raises(PlatformError, match="never recorded"):
        start.elapsed_time(end)
    start.record()
    end.record(torch.cuda.current_stream())
    start.wait()
    end.synchronize()
    assert end.query()
    assert 0.0 <= start.elapsed_time(end) < 1000.0


def test_queries(transfer: types.ModuleType) -> None:
    assert torch.cuda.is_available() is False
    assert torch.cuda.device_count() == 0
    torch.cuda.set_device("cuda:3")
    assert torch.cuda.current_device() == 0
    torch.cuda.init()
    properties = torch.cuda.get_device_properties(torch.device("cuda", 0))
    assert properties.multi_processor_count >= 1
    assert (properties.major, properties.minor) == torch.cuda.get_device_capability("cuda")
    assert properties.name == torch.cuda.get_device_name()
    assert torch.cuda.default_generators == (torch.default_generator,)


def test_memory(transfer: types.ModuleType) -> None:
    torch.cuda.empty_cache()
    torch.cuda.ipc_collect()
    torch.cuda.reset_peak_memory_stats()
    free, total = torch.cuda.mem_get_info()
    assert 0 < free <= total == torch.cuda.get_device_properties().total_memory
    assert 0 < torch.cuda.memory_allocated() <= torch.cuda.max_memory_allocated("cuda")
    assert 0 < torch.cuda.memory_reserved() <= torch.cuda.max_memory_reserved()


def test_sync_debug_mode_is_remembered(transfer: types.ModuleType) -> None:
    torch.cuda.set_sync_debug_mode("error")
    assert torch.cuda.get_sync_debug_mode() == "error"


def test_threads(transfer: types.ModuleType) -> None:
    seen: list[torch.device] = []
    worker = threading.Thread(
        target=lambda: seen.append(torch.ones(1, device="cuda").cuda().device)
    )
    worker.start()
    worker.join()
    assert seen == [CPU]


def test_other_modes_stay_on_the_stack(transfer: types.ModuleType) -> None:
    class Counting(torch.overrides.TorchFunctionMode):
        calls = 0

        def __torch_function__(self, func, types, args=(), kwargs=None):
            Counting.calls += 1
            return func(*args, **(kwargs or {}))

    with Counting():
        torch.ones(1, device="cuda")
        transfer.uninstall()
        torch.ones(1)
    assert Counting.calls == 2
    assert torch._C._len_torch_function_stack() == 0


def test_install_and_uninstall_restore_everything() -> None:
    module = importlib.import_module(NAME)
    module.uninstall()
    before = _attributes()
    depth = torch._C._len_torch_function_stack()
    host = module.Target("cpu")
    assert module.install(host) is host
    assert module.install() is host
    changed = {key for key, value in _attributes().items() if before.get(key) is not value}
    assert ("torch", "Generator") in changed
    assert {key for key in changed if key[0] in ("tensor", "module")} == {
        ("tensor", "record_stream")
    }
    module.uninstall()
    module.uninstall()
    after = _attributes()
    assert before.keys() == after.keys()
    assert all(before[key] is after[key] for key in before)
    assert torch._C._len_torch_function_stack() == depth
    with pytest.raises((AssertionError, RuntimeError)):
        torch.zeros(1, device="cuda")


def test_every_replacement_has_its_reason(transfer: types.ModuleType) -> None:
    rows = list(transfer._replacements(transfer.Target("cpu"), transfer._Redirect(CPU)))
    assert all(row.reason for row in rows)
    assert len({(id(row.owner), row.name) for row in rows}) == len(rows)


IMPORTED = """
import importlib, sys
import torch
assert "torch.utils._device" not in sys.modules
from torch import zeros
import deepinfer_neuron.compat.transfer_to_neuron as transfer
generator = torch.Generator
transfer = importlib.reload(transfer)
del sys.modules[transfer.__name__]
transfer = importlib.import_module(transfer.__name__)
assert torch.Generator is generator and torch._C._len_torch_function_stack() == 1
assert zeros(2, device="cuda").cuda().to("cuda").device.type == "cpu"
with torch.device("cuda"):
    assert zeros(2).device.type == "cpu"
transfer.uninstall()
assert torch._C._len_torch_function_stack() == 0
print("host")
"""


def test_without_the_module_of_device_contexts(monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module(NAME)
    module.uninstall()
    monkeypatch.setitem(sys.modules, "torch.utils._device", None)
    module.install(module.Target("cpu"))
    try:
        assert torch.zeros(2, device="cuda").cuda().device == CPU
    finally:
        module.uninstall()


COMPILED = """
import torch
import deepinfer_neuron.compat.transfer_to_neuron as transfer
def region(x):
    return x.to("cuda") + torch.arange(3, device="cuda").cuda() + torch.zeros(3)
compiled = torch.compile(region, backend="eager", fullgraph=True)
assert compiled(torch.ones(3)).tolist() == [1, 2, 3]
with torch.device("cuda"):
    assert compiled(torch.ones(3)).tolist() == [1, 2, 3]
print("done")
"""


@pytest.mark.slow
def test_whole_graphs_can_be_captured() -> None:
    assert _run(COMPILED) == "done\n"


ON_NEURON = """
import simulated_neuron
from deepinfer_neuron.errors import PlatformError
simulated_neuron.start()
assert transfer.install().type == "neuron"
def there(x):
    return x.device == torch.device("neuron", 0)
assert there(torch.ones(2, device="cuda")) and there(torch.zeros(2, device="cuda:0"))
assert there(torch.ones(2).cuda()) and there(torch.ones(2).to("cuda"))
assert there(torch.ones(2).cuda(0))
assert torch.ones(2).device.type == "cpu"
with torch.device("cuda"):
    assert there(torch.ones(2)) and torch.ones(2, device="cpu").device.type == "cpu"
assert there(torch.nn.Linear(2, 2).cuda().weight) and there(torch.nn.Linear(2, 2).to("cuda").weight)
assert torch.ones(2, device="cuda").cpu().tolist() == [1, 1]
assert torch.cuda.is_available() and torch.cuda.device_count() == 1
torch.cuda.set_device(torch.device("cuda:0"))
torch.cuda.synchronize("cuda")
torch.cuda.manual_seed_all(7)
assert simulated_neuron.CALLS == [
    ("set_device", (torch.device("neuron:0"),)),
    ("synchronize", (torch.device("neuron"),)),
    ("manual_seed_all", (7,)),
]
torch.manual_seed(8)
assert ("manual_seed_all", (8,)) in simulated_neuron.CALLS
try:
    torch.cuda.mem_get_info()
except PlatformError as error:
    assert "no mem_get_info" in str(error)
else:
    raise AssertionError
try:
    torch.Generator(device="cuda")
except NotImplementedError as error:
    assert "PrivateUse1" in str(error)
else:
    raise AssertionError
transfer.uninstall()
torch.neuron.cores = 0
assert transfer.find_target().type == "cpu"
print("neuron")
"""


@pytest.fixture(scope="module")
def own_process() -> str:
    """What both scripts print in a process of their own; starting torch takes long."""
    return _run(IMPORTED + ON_NEURON)


def test_import_twice_and_reload(own_process: str) -> None:
    assert "host" in own_process


def test_on_a_simulated_neuron_device(own_process: str) -> None:
    assert "neuron" in own_process
