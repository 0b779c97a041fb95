"""``doctor``: facts about a machine, measurements, and what follows from them."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from deepinfer_neuron.cli import probe
from deepinfer_neuron.cli.doctor import Verdict, judge
from deepinfer_neuron.cli.main import main
from deepinfer_neuron.platform.neuron_parts import NeuronParts

GIB = 2**30


def test_an_x86_processor_is_read_from_the_kernel(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(
        "processor\t: 0\nmodel name\t: Some CPU @ 2.0GHz\nflags\t\t: fpu avx2 fma amx_bf16\n\n"
        "processor\t: 1\nmodel name\t: Other\nflags\t\t: fpu\n"
    )
    assert probe.read_cpu(cpuinfo) == probe.Cpu("Some CPU @ 2.0GHz", ("amx_bf16", "avx2", "fma"))


def test_an_arm_processor_is_read_from_the_kernel(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor\t: 0\nFeatures\t: fp asimd bf16 i8mm sve\n")
    cpu = probe.read_cpu(cpuinfo)
    assert cpu.features == ("asimd", "bf16", "i8mm", "sve")
    assert cpu.model


def test_a_processor_without_kernel_description_still_has_a_name(tmp_path: Path) -> None:
    cpu = probe.read_cpu(tmp_path / "missing")
    assert cpu.model
    assert cpu.features == ()


def _parts(**changes: Any) -> NeuronParts:
    whole = NeuronParts(("/dev/neuron0",), "2.13.3.0", "2.13.0+cpu", "0", ())
    return dataclasses.replace(whole, **changes)


NO_PARTS = _parts(devices=(), package=None, cores=None)


def _verdicts(parts: NeuronParts, available: int = 64 * GIB) -> dict[str, Verdict]:
    return {verdict.what: verdict for verdict in judge(available, parts)}


def test_the_released_model_needs_its_resident_bytes() -> None:
    # 510,286,023,000 bytes in all, of which 202,758,032,400 are n-gram tables left on disk.
    needed = 307_527_990_600
    what = "DeepSeek-V4.1-Flash, packed weights"
    assert _verdicts(NO_PARTS, needed)[what].ok
    assert not _verdicts(NO_PARTS, needed - 1)[what].ok


def test_without_neuron_parts_the_simulated_device_remains() -> None:
    verdicts = _verdicts(NO_PARTS)
    assert {what: verdict.ok for what, verdict in verdicts.items()} == {
        "device cpu": True,
        "device neuron": False,
        "Neuron driver": False,
        "TorchNeuron": False,
        "TorchNeuron for this torch": False,
        "Neuron cores": False,
        "Neuron environment": True,
        "device neuron, simulated": True,
        "DeepSeek-V4.1-Flash, packed weights": False,
    }
    assert "Neuron driver, TorchNeuron" in verdicts["device neuron"].why
    assert "install aws-neuronx-dkms" in verdicts["Neuron driver"].why
    assert "AWS package index" in verdicts["TorchNeuron"].why


def test_with_every_part_the_device_is_usable_and_not_called_measured() -> None:
    verdicts = _verdicts(_parts())
    assert verdicts["device neuron"].ok
    assert "not been measured on the hardware" in verdicts["device neuron"].why
    assert not verdicts["device neuron, simulated"].ok


@pytest.fixture
def quick_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the measurements, which take time and memory, by fixed numbers."""
    monkeypatch.setattr(probe, "matmul_gflops", lambda: 12.345)
    monkeypatch.setattr(probe, "copy_gbytes_per_second", lambda: 6.789)


@pytest.mark.usefixtures("quick_probe")
def test_json_report_holds_every_fact(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["bf16_matmul_gflops"] == 12.35
    assert report["copy_gbytes_per_second"] == 6.79
    assert 0 < report["memory_available"] <= report["memory_total"]
    assert [verdict["what"] for verdict in report["verdicts"]][:2] == [
        "device cpu",
        "device neuron",
    ]


@pytest.mark.usefixtures("quick_probe")
def test_human_report_is_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "bf16 matmul" in out
    assert "12.3 GFLOP/s" in out
    assert "device neuron" in out


def test_measurements_are_plausible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "_MATMUL_SIZE", 32)
    monkeypatch.setattr(probe, "_COPY_BYTES", 1 << 16)
    monkeypatch.setattr(probe, "_MEASURE_SECONDS", 0.01)
    assert 0 < probe.matmul_gflops() < 1e6
    assert 0 < probe.copy_gbytes_per_second() < 1e6
