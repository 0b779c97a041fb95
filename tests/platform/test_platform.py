"""The devices that the engine can be asked for."""

from __future__ import annotations

import psutil
import pytest
import torch

from deepinfer_neuron.errors import PlatformError
from deepinfer_neuron.platform import CpuPlatform, Platform, get_platform


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


def test_neuron_is_refused_honestly() -> None:
    with pytest.raises(PlatformError, match=r"'neuron' is not available in this version.*'cpu'"):
        get_platform("neuron")


@pytest.mark.parametrize("name", ["cuda", "CPU", ""])
def test_an_unknown_device_is_named(name: str) -> None:
    with pytest.raises(PlatformError, match=f"device '{name}' is not known; use device 'cpu'"):
        get_platform(name)


def test_a_platform_must_say_what_it_is() -> None:
    with pytest.raises(TypeError, match="abstract"):
        Platform()  # type: ignore[abstract]
