"""A Neuron device without the hardware: its rules are enforced and its work is counted."""

from __future__ import annotations

from deepinfer_neuron.platform.simulator.backend import SimulatedBackend
from deepinfer_neuron.platform.simulator.counts import (
    Counts,
    GraphReport,
    SimulatorReport,
    StepKind,
    StepReport,
    Violation,
)
from deepinfer_neuron.platform.simulator.device import DeviceTensor
from deepinfer_neuron.platform.simulator.limits import Limits, Mode
from deepinfer_neuron.platform.simulator.platform import SimulatedNeuronPlatform
from deepinfer_neuron.platform.simulator.ranks import compare_graphs, compare_steps
from deepinfer_neuron.platform.simulator.rules import RULES, Rule
from deepinfer_neuron.platform.simulator.simulator import Simulator

__all__ = [
    "RULES",
    "Counts",
    "DeviceTensor",
    "GraphReport",
    "Limits",
    "Mode",
    "Rule",
    "SimulatedBackend",
    "SimulatedNeuronPlatform",
    "Simulator",
    "SimulatorReport",
    "StepKind",
    "StepReport",
    "Violation",
    "compare_graphs",
    "compare_steps",
]
