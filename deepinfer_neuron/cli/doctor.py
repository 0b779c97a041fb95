"""``deepinfer-neuron doctor``: what this machine is and what it can run."""

from __future__ import annotations

import argparse
import dataclasses
import os
import platform
from dataclasses import dataclass
from typing import TYPE_CHECKING

from deepinfer_neuron.cli.command import Command
from deepinfer_neuron.cli.output import console, format_bytes, print_json

if TYPE_CHECKING:
    from deepinfer_neuron.platform.neuron_parts import NeuronParts

# DeepSeek-V4.1-Flash as released: all tensors, less the two n-gram tables (384,006,168 and
# 384,016,682 rows of 256 code bytes and 8 scale bytes), whose rows are read from the files.
_FLASH_RESIDENT_BYTES = 510_286_023_000 - (384_006_168 + 384_016_682) * (256 + 8)


@dataclass(frozen=True)
class Verdict:
    """Whether something runs here, and why."""

    what: str
    ok: bool
    why: str


@dataclass(frozen=True)
class Report:
    """Everything that ``doctor`` says. Memory in bytes, speeds in 10^9 per second."""

    python: str
    system: str
    torch: str
    cpu: str
    cpu_features: tuple[str, ...]
    cores: int
    threads: int
    memory_total: int
    memory_available: int
    torch_neuronx: str | None
    neuron_devices: tuple[str, ...]
    bf16_matmul_gflops: float
    copy_gbytes_per_second: float
    verdicts: tuple[Verdict, ...]


def judge(available: int, parts: NeuronParts) -> list[Verdict]:
    """What runs on a machine with ``available`` bytes of free memory and these Neuron parts."""
    flash = f"needs about {format_bytes(_FLASH_RESIDENT_BYTES)}"
    findings = parts.findings()
    missing = [finding.what for finding in findings if not finding.ok]
    neuron = (
        f"not as it must be: {', '.join(missing)}"
        if missing
        else "every part is here; this version has not been measured on the hardware"
    )
    simulated = (
        "torch_neuronx is installed, and torch knows one such device"
        if parts.package
        else "rules and counts of the Neuron device, computed on the host"
    )
    return [
        Verdict("device cpu", True, "always available"),
        Verdict("device neuron", not missing, neuron),
        *(Verdict(finding.what, finding.ok, finding.why) for finding in findings),
        Verdict("device neuron, simulated", parts.package is None, simulated),
        Verdict(
            "DeepSeek-V4.1-Flash, packed weights",
            available >= _FLASH_RESIDENT_BYTES,
            f"{flash} without the n-gram tables, which stay on disk; "
            f"{format_bytes(available)} available",
        ),
    ]


def examine() -> Report:
    """Look at this machine and measure it, for about a second."""
    import torch

    from deepinfer_neuron.cli import probe
    from deepinfer_neuron.platform import get_platform
    from deepinfer_neuron.platform.neuron_parts import find_parts

    cpu = probe.read_cpu()
    memory = get_platform("cpu")
    available = memory.available_memory_bytes()
    parts = find_parts(os.environ)
    return Report(
        python=platform.python_version(),
        system=platform.platform(),
        torch=torch.__version__,
        cpu=cpu.model,
        cpu_features=cpu.features,
        cores=os.cpu_count() or 1,
        threads=torch.get_num_threads(),
        memory_total=memory.total_memory_bytes(),
        memory_available=available,
        torch_neuronx=parts.package,
        neuron_devices=parts.devices,
        bf16_matmul_gflops=round(probe.matmul_gflops(), 2),
        copy_gbytes_per_second=round(probe.copy_gbytes_per_second(), 2),
        verdicts=tuple(judge(available, parts)),
    )


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print the report as one JSON object")


def _run(args: argparse.Namespace) -> int:
    report = examine()
    if args.json:
        print_json(dataclasses.asdict(report))
    else:
        _show(report)
    return 0


def _show(report: Report) -> None:
    """Print the report as a table of facts and a table of verdicts."""
    from rich.table import Table

    facts = Table.grid(padding=(0, 3))
    rows = {
        "Python": f"{report.python} on {report.system}",
        "PyTorch": f"{report.torch}, {report.threads} thread(s)",
        "CPU": f"{report.cpu}, {report.cores} logical core(s)",
        "CPU features": " ".join(report.cpu_features) or "none that matter here",
        "Memory": f"{format_bytes(report.memory_total)}, "
        f"{format_bytes(report.memory_available)} available",
        "torch_neuronx": report.torch_neuronx or "not installed",
        "Neuron devices": " ".join(report.neuron_devices) or "none",
        "bf16 matmul": f"{report.bf16_matmul_gflops:.1f} GFLOP/s",
        "Memory copy": f"{report.copy_gbytes_per_second:.1f} GB/s (read + write)",
    }
    for label, value in rows.items():
        facts.add_row(label, value)
    verdicts = Table(title="What runs here", title_justify="left", box=None, padding=(0, 3, 0, 0))
    for heading in ("", "", "why"):
        verdicts.add_column(heading)
    for verdict in report.verdicts:
        verdicts.add_row(verdict.what, "yes" if verdict.ok else "no", verdict.why)
    out = console()
    out.print(facts)
    out.print()
    out.print(verdicts)


COMMAND = Command("doctor", "show what this machine is and can run", _add_arguments, _run)
