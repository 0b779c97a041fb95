"""The devices that the engine can be asked for."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
import torch
from torch import Tensor

from deepinfer_neuron.errors import PlatformError
from deepinfer_neuron.platform import CpuPlatform, NeuronPlatform, Platform, get_platform
from deepinfer_neuron.platform.neuron_parts import neuron_devices, package_version
from deepinfer_neuron.platform.regions import CompiledBackend, PlainBackend


def test_the_cpu_platform_describes_the_cpu() -> None:
    platform = get_platform("cpu")
    assert isinstance(platform, CpuPlatform)
    assert platform.name == "cpu"
    assert platform.device == torch.device("cpu")
    assert platform.dtype == torch.bfloat16


def test_memory_is_that_of_the_operating_system() -> None:
    platform = get_platform("cpu")
    assert platform.total_memory_bytes() == psutil.virtual_memory().total
    assert 0 < platform.available_memory_bytes() <= platform.total_memory_bytes()


def test_the_cpu_computes_with_everything_and_needs_no_graph() -> None:
    platform = get_platform("cpu")
    assert platform.compile_backend is None
    assert platform.collectives_backend == "gloo"
    assert not platform.graph
    assert platform.supports(torch.float64)
    assert platform.quirks.fp8_max == 448
    assert isinstance(platform.make_regions().backend, PlainBackend)


def test_compiled_regions_of_the_cpu_are_graphs_of_inductor() -> None:
    platform = get_platform("cpu", compile="regions")
    assert platform.compile_backend == "inductor"
    assert platform.graph
    assert isinstance(platform.make_regions().backend, CompiledBackend)
    assert isinstance(platform.make_regions("off").backend, PlainBackend)


@pytest.mark.parametrize("device", ["cpu", "neuron"])
def test_an_unknown_compile_mode_is_named(device: str) -> None:
    with pytest.raises(PlatformError, match="compile='max' is not known; use one of 'off', 'reg"):
        get_platform(device, compile="max")
    with pytest.raises(PlatformError, match="compile='max' is not known"):
        get_platform("cpu").make_regions("max")


def test_copies_between_host_and_cpu_are_copies() -> None:
    platform = get_platform("cpu")
    buffer, block = torch.zeros(4, dtype=torch.int32), torch.arange(4, dtype=torch.int32)
    platform.upload(block, buffer)
    read = platform.download(buffer)
    buffer.zero_()
    assert read.tolist() == [0, 1, 2, 3]
    assert platform.to_device(block) is block


@pytest.mark.parametrize(
    ("block", "problem"),
    [
        (torch.zeros(3, dtype=torch.int32), "shapes and dtypes must be the same"),
        (torch.zeros(4), "shapes and dtypes must be the same"),
        (torch.zeros(4, 2, dtype=torch.int32)[:, 0], "not contiguous"),
    ],
)
def test_an_upload_neither_casts_nor_gathers(block: Tensor, problem: str) -> None:
    with pytest.raises(PlatformError, match=problem):
        get_platform("cpu").upload(block, torch.zeros(4, dtype=torch.int32))


PACKAGE = "deepinfer_neuron.platform.neuron_parts.package_version"


@pytest.fixture
def devices(tmp_path: Path) -> Path:
    """A directory with the device files of a driver, among others."""
    for name in ("neuron10", "neuron2", "neuron_helper", "null"):
        (tmp_path / name).touch()
    return tmp_path


def test_device_files_are_listed_by_number(devices: Path) -> None:
    names = [Path(path).name for path in neuron_devices(devices)]
    assert names == ["neuron2", "neuron10"]


def test_package_versions_are_found_without_importing() -> None:
    assert package_version("psutil", "psutil") == psutil.__version__
    assert package_version("no_such_module", "no-such-module") is None
    assert package_version("json", "no-such-distribution") == "unknown"


def _open_problem(devices: Path, environ: dict[str, str]) -> str:
    with pytest.raises(PlatformError) as caught:
        NeuronPlatform.open(environ=environ, devices=devices)
    return str(caught.value)


def test_neuron_without_a_driver_is_refused(tmp_path: Path) -> None:
    problem = _open_problem(tmp_path, {})
    assert "no /dev/neuron* found" in problem
    assert "simulate=True" in problem
    assert "doctor" in problem


@pytest.mark.parametrize(
    ("version", "problem"),
    [
        (None, "install torch-neuronx from the AWS package index"),
        ("1.0", "is a placeholder"),
        ("2.9.0.1", "needs torch_neuronx 2."),
        ("unknown", "is a placeholder"),
    ],
)
def test_neuron_without_its_package_is_refused(
    devices: Path, monkeypatch: pytest.MonkeyPatch, version: str | None, problem: str
) -> None:
    monkeypatch.setattr(PACKAGE, lambda module, distribution: version)
    assert problem in _open_problem(devices, {})


@pytest.mark.parametrize(
    ("environ", "problem"),
    [
        ({"NEURON_RT_VISIBLE_CORES": "0-3"}, "must name one core per process"),
        ({"NEURON_RT_STOCHASTIC_ROUNDING_EN": "1"}, "NEURON_RT_STOCHASTIC_ROUNDING_EN=1 would"),
        ({"TORCH_NEURONX_DISABLE_FALLBACK_EXECUTION": "0"}, "FALLBACK_EXECUTION=0 would"),
        ({"NEURON_CC_FLAGS": "-O1 --auto-cast=matmult"}, "--auto-cast=matmult would"),
    ],
)
def test_an_environment_that_changes_results_is_refused(
    devices: Path, monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], problem: str
) -> None:
    monkeypatch.setattr(PACKAGE, lambda module, distribution: torch.__version__)
    assert problem in _open_problem(devices, environ)


def test_a_package_that_cannot_be_loaded_is_named(
    devices: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PACKAGE, lambda module, distribution: torch.__version__)
    environ: dict[str, str] = {"NEURON_CC_FLAGS": "--auto-cast none"}
    assert "installed but cannot be loaded" in _open_problem(devices, environ)
    assert environ["NEURON_RT_STOCHASTIC_ROUNDING_EN"] == "0"


class FakeModule:
    """What the platform asks of ``torch.neuron``."""

    synchronized = 0

    def memory_allocated(self) -> int:
        return 2**30

    def synchronize(self) -> None:
        self.synchronized += 1


def test_the_neuron_platform_describes_trn2() -> None:
    platform = NeuronPlatform(FakeModule())
    assert platform.name == "neuron"
    assert platform.compile_backend == "neuron"
    assert platform.collectives_backend == "neuron"
    assert platform.graph
    assert platform.total_memory_bytes() == 24 * 2**30
    assert platform.available_memory_bytes() == 23 * 2**30
    assert platform.supports(torch.bfloat16)
    assert not platform.supports(torch.int64)
    assert not platform.supports(torch.float8_e4m3fn)
    quirks = platform.quirks
    assert (quirks.rows_pow2, quirks.fp8_max, quirks.dequant_chunk) == (True, 240.0, 2**25)
    assert isinstance(platform.make_regions().backend, CompiledBackend)
    assert isinstance(NeuronPlatform(FakeModule(), "off").make_regions().backend, PlainBackend)
    with pytest.raises(PlatformError, match="at most 32 bits"):
        platform.to_device(torch.zeros(2, dtype=torch.int64))


def test_a_download_is_complete_after_waiting() -> None:
    module = FakeModule()
    download = NeuronPlatform(module).start_download(torch.ones(2))
    assert module.synchronized == 0
    assert download.wait().tolist() == [1, 1]
    assert module.synchronized == 1


@pytest.mark.parametrize("name", ["cuda", "CPU", ""])
def test_an_unknown_device_is_named(name: str) -> None:
    with pytest.raises(
        PlatformError, match=f"device '{name}' is not known; use device 'cpu' or 'neuron'"
    ):
        get_platform(name)


def test_a_platform_must_say_what_it_is() -> None:
    with pytest.raises(TypeError, match="abstract"):
        Platform()  # type: ignore[abstract]
