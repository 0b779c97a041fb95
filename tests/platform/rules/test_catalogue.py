"""The catalogue of rules as a whole, and what a violation leads to in each mode."""

from __future__ import annotations

import json
import pickle

import pytest
from torch import Tensor, nn

from deepinfer_neuron.errors import DeviceRuleError, PlatformError
from deepinfer_neuron.platform.neuron_parts import NeuronParts
from deepinfer_neuron.platform.simulator import RULES, Simulator
from tests.platform.rules import test_boundary, test_graphs, test_numbers, test_ranks
from tests.support.simulated_device import Device


def _is_pair(value: object) -> bool:
    return hasattr(value, "rule") and callable(value)


def test_every_rule_that_can_be_checked_has_a_pair() -> None:
    pairs = (test_boundary, test_graphs, test_numbers)
    tested = {test.rule for module in pairs for test in vars(module).values() if _is_pair(test)}
    tested |= test_ranks.COLLECTIVES.keys() | {"C08", "G05", "G19"}
    checked = {name for name, rule in RULES.items() if rule.check not in ("none", "start")}
    assert tested == checked
    assert all(rule.id == name and rule.workaround for name, rule in RULES.items())


def test_rules_about_the_start_are_named_where_the_platform_refuses() -> None:
    starts = {name for name, rule in RULES.items() if rule.check == "start"}
    bad = NeuronParts(("/dev/neuron0",), None, "2.13.0", "0-3", (("NEURON_CC_FLAGS", "x"),))
    text = " ".join(finding.why for finding in bad.findings())
    assert starts == {"C01", "D13", "G18"} == {name for name in RULES if name in text}


def test_an_error_says_what_where_and_what_instead() -> None:
    device = Device()
    x = device.ints(7, 8)
    with pytest.raises(DeviceRuleError) as caught:
        device.run(lambda x: x // 2, x)
    error = caught.value
    assert "aten.floor_divide.default(int32[2])" in error.detail
    assert error.where.startswith(f"{__file__}:")
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_a_broken_graph_is_refused_every_time() -> None:
    device = Device()
    for _ in range(2):
        with pytest.raises(DeviceRuleError, match="D15"):
            device.run(_squared, device.zeros(4), module=device.module)


def _squared(module: nn.Module, x: Tensor) -> Tensor:
    return x**2


def test_warnings_are_collected_once_each_and_per_step() -> None:
    device = Device("warn")
    x = device.put([1.0, 2.0])
    for _ in range(2):
        with device.simulator.step():
            out = device.run(_squared, x, module=device.module)
    assert out.tolist() == [1, 4]
    report = device.simulator.report()
    assert [violation.rule for violation in report.violations] == ["D15"]
    assert report.last_step is not None
    assert [violation.rule for violation in report.last_step.violations] == ["D15"]
    assert json.loads(json.dumps(report.to_dict()))["violations"][0]["rule"] == "D15"


def test_a_graph_that_cannot_be_captured_runs_anyway_when_only_warned() -> None:
    def branching(x: Tensor) -> Tensor:
        return x + 1 if x.sum() > 0 else x

    device = Device("warn")
    assert device.run(branching, device.put([1.0])).tolist() == [2]
    assert [violation.rule for violation in device.simulator.report().violations] == ["G07"]


def test_off_means_off() -> None:
    device = Device("off")
    x = device.put([1.0, 2.0])
    with device.simulator.step():
        assert device.run(_squared, x, module=device.module)[0].item() == 1
    report = device.simulator.report()
    assert report.violations == ()
    assert report.total.downloads == 1


def test_a_rule_can_be_waived() -> None:
    device = Device(waived=frozenset({"D15"}))
    device.run(_squared, device.zeros(4), module=device.module)


def test_unknown_modes_and_rules_are_refused() -> None:
    with pytest.raises(PlatformError, match="mode 'loud' is not known; use one of off, warn"):
        Simulator("loud")  # type: ignore[arg-type]
    with pytest.raises(PlatformError, match="there is no rule X1, X2"):
        Simulator(waived=frozenset({"X2", "X1", "G01"}))
