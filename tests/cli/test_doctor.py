"""``doctor``: facts about a machine, measurements, and what follows from them."""

from __future__ import annotations

import json
from pathlib import Path

import psutil
import pytest

from deepinfer_neuron.cli import probe
from deepinfer_neuron.cli.doctor import judge
from deepinfer_neuron.cli.main import main

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


def test_neuron_devices_are_listed_by_number(tmp_path: Path) -> None:
    for name in ("neuron10", "neuron2", "neuron_helper", "null"):
        (tmp_path / name).touch()
    names = [Path(path).name for path in probe.neuron_devices(tmp_path)]
    assert names == ["neuron2", "neuron10"]


def test_package_versions_are_found_without_importing() -> None:
    assert probe.package_version("psutil", "psutil") == psutil.__version__
    assert probe.package_version("no_such_module", "no-such-module") is None
    assert probe.package_version("json", "no-such-distribution") == "unknown"


def test_the_released_model_needs_its_resident_bytes() -> None:
    # 510,286,023,000 bytes in all, of which 202,758,032,400 are n-gram tables left on disk.
    needed = 307_527_990_600
    enough = {verdict.what: verdict.ok for verdict in judge(needed, None, ())}
    short = {verdict.what: verdict.ok for verdict in judge(needed - 1, None, ())}
    assert enough == {
        "device cpu": True,
        "device neuron": False,
        "DeepSeek-V4.1-Flash, packed weights": True,
    }
    assert short["DeepSeek-V4.1-Flash, packed weights"] is False


def test_neuron_is_not_claimed_even_where_its_parts_are_present() -> None:
    verdict = judge(64 * GIB, "2.14.3", ("/dev/neuron0",))[1]
    assert not verdict.ok
    assert verdict.why == (
        "this version runs on the CPU only; torch_neuronx is installed and 1 Neuron device(s) found"
    )


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
