"""What a machine must have for the Neuron device, and what of it is here."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

_NEURON_FILE = re.compile(r"neuron([0-9]+)")
_AUTO_CAST = re.compile(r"--auto-cast(?:[ =]+)(\S+)")


@dataclass(frozen=True)
class Finding:
    """One part: whether it is as it must be, and why or what to do."""

    what: str
    ok: bool
    why: str


@dataclass(frozen=True)
class NeuronParts:
    """The parts of this machine.

    Attributes:
        devices: files of the driver, by number.
        package: version of ``torch_neuronx``, or ``None``.
        torch_version: version of torch.
        cores: what ``NEURON_RT_VISIBLE_CORES`` says, or ``None``.
        environment: variables that contradict what results depend on, with their values.
    """

    devices: tuple[str, ...]
    package: str | None
    torch_version: str
    cores: str | None
    environment: tuple[tuple[str, str], ...]

    def findings(self) -> tuple[Finding, ...]:
        """Driver, package, torch line, cores and environment, in the order of installation."""
        return (self._driver(), self._package(), self._line(), self._cores(), self._variables())

    def _driver(self) -> Finding:
        if self.devices:
            return Finding("Neuron driver", True, f"{len(self.devices)} device(s) found")
        return Finding(
            "Neuron driver",
            False,
            "no /dev/neuron* found; use a trn2 or trn3 instance and install aws-neuronx-dkms",
        )

    def _package(self) -> Finding:
        if self.package is None:
            why = "torch_neuronx is not installed; install torch-neuronx from the AWS package index"
            return Finding("TorchNeuron", False, why)
        if _line(self.package) is None:
            why = f"torch_neuronx {self.package} is a placeholder; install it from the AWS index"
            return Finding("TorchNeuron", False, why)
        return Finding("TorchNeuron", True, f"torch_neuronx {self.package}")

    def _line(self) -> Finding:
        wanted, here = _line(self.torch_version), _line(self.package or "")
        if here is None:
            return Finding("TorchNeuron for this torch", False, "torch_neuronx is not installed")
        if wanted != here:
            why = (
                f"torch {self.torch_version} needs torch_neuronx {wanted}.*, and {self.package} "
                "is installed; install the pair of one line"
            )
            return Finding("TorchNeuron for this torch", False, why)
        return Finding("TorchNeuron for this torch", True, f"both are of the line {wanted}")

    def _cores(self) -> Finding:
        if not self.devices:
            return Finding("Neuron cores", False, "no driver, no cores")
        if self.cores is None:
            why = "NEURON_RT_VISIBLE_CORES is not set; this process takes the first core"
            return Finding("Neuron cores", True, why)
        one = re.fullmatch(r"[0-9]+", self.cores) is not None
        why = f"NEURON_RT_VISIBLE_CORES={self.cores}"
        if not one:
            why += " must name one core per process (C01)"
        return Finding("Neuron cores", one, why)

    def _variables(self) -> Finding:
        if not self.environment:
            return Finding("Neuron environment", True, "nothing contradicts what results depend on")
        wrong = ", ".join(f"{name}={value}" for name, value in self.environment)
        right = " ".join(f"{name}={value}" for name, value in required_environment().items())
        why = f"{wrong} would change results (D13) or hide failures (G18)"
        return Finding("Neuron environment", False, f"{why}; unset it (needed: {right})")


def required_environment() -> dict[str, str]:
    """Variables that must have these values.

    No stochastic rounding; a graph that does not compile, or is given a host tensor, is an error.
    """
    return {
        "NEURON_RT_STOCHASTIC_ROUNDING_EN": "0",
        "TORCH_NEURONX_DISABLE_FALLBACK_EXECUTION": "1",
        "TORCH_NEURONX_DYNAMO_DISABLE_CPU_AUTOCOPY": "1",
    }


def find_parts(environ: Mapping[str, str], directory: Path = Path("/dev")) -> NeuronParts:
    """Look for the parts, without loading any.

    Args:
        environ: such as ``os.environ``.
        directory: where device files are.
    """
    return NeuronParts(
        devices=neuron_devices(directory),
        package=package_version("torch_neuronx", "torch-neuronx"),
        torch_version=torch.__version__,
        cores=environ.get("NEURON_RT_VISIBLE_CORES"),
        environment=wrong_environment(environ),
    )


def wrong_environment(environ: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """Variables that contradict :func:`required_environment`, or ask for automatic casts."""
    wrong = [
        (name, environ[name])
        for name, value in required_environment().items()
        if environ.get(name, value) != value
    ]
    flags = environ.get("NEURON_CC_FLAGS", "")
    if any(value != "none" for value in _AUTO_CAST.findall(flags)):
        wrong.append(("NEURON_CC_FLAGS", flags))
    return tuple(wrong)


def package_version(module: str, distribution: str) -> str | None:
    """Version of an installed package, without importing it; ``None`` if it is not installed."""
    try:
        if importlib.util.find_spec(module) is None:
            return None
    except ValueError:
        # A module that was put into ``sys.modules`` by hand has no specification.
        return "unknown"
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def neuron_devices(directory: Path = Path("/dev")) -> tuple[str, ...]:
    """Paths of the Neuron driver's device files, by number."""
    found = []
    for path in directory.glob("neuron*"):
        match = _NEURON_FILE.fullmatch(path.name)
        if match:
            found.append((int(match[1]), str(path)))
    return tuple(path for _, path in sorted(found))


def _line(version: str) -> str | None:
    """Major and minor number of a release line that TorchNeuron and torch share."""
    match = re.match(r"(2\.[0-9]+)\.", version)
    return match[1] if match else None
