"""Pairs of snippets for the rules of the Neuron device: one that is caught, one that is not."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deepinfer_neuron.errors import DeviceRuleError
from deepinfer_neuron.platform.regions import RegionModule
from deepinfer_neuron.platform.simulator import RULES
from tests.support.simulated_device import Device

Snippet = Callable[[Device], Any]
Pair = tuple[Snippet, Snippet]


def rule(name: str, waived: str = "") -> Callable[[Callable[[], Pair]], Callable[[], None]]:
    """Make a test of a function that returns a bad and a good snippet.

    The bad one must be caught under the id ``name``; ``waived`` is another rule that it cannot
    help breaking. The good one must pass all rules.
    """

    def make(pair: Callable[[], Pair]) -> Callable[[], None]:
        def test() -> None:
            bad, good = pair()
            with pytest.raises(DeviceRuleError, match=re.escape(RULES[name].title)) as caught:
                bad(Device(waived=frozenset({waived} - {""})))
            assert caught.value.rule == name
            assert RULES[name].workaround in str(caught.value)
            good(Device())

        test.rule = name  # type: ignore[attr-defined]
        test.__doc__ = pair.__doc__
        return test

    return make


def in_region(body: Callable[..., Any], *args: Callable[[Device], Tensor]) -> Snippet:
    """Runs ``body`` as a region on arguments made on the device."""
    return lambda d: d.run(body, *(arg(d) for arg in args))


def in_step(body: Callable[..., Any], *args: Callable[[Device], Tensor]) -> Snippet:
    """Runs ``body`` within a step on arguments that were on the device before."""

    def run(d: Device) -> None:
        given = [arg(d) for arg in args]
        with d.simulator.step():
            body(*given)

    return run


def outside(body: Callable[..., Any], *args: Callable[[Device], Tensor]) -> Snippet:
    """Runs ``body`` outside regions and steps."""
    return lambda d: body(*(arg(d) for arg in args))


def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Callable[[Device], Tensor]:
    return lambda d: d.zeros(*shape, dtype=dtype)


def ints(*values: int) -> Callable[[Device], Tensor]:
    return lambda d: d.ints(*values)


def double(module: nn.Module, x: Tensor) -> Tensor:
    return x + x


def uploads(count: int) -> Snippet:
    def snippet(d: Device) -> None:
        buffer = d.zeros(4)
        with d.simulator.step():
            for _ in range(count):
                d.platform.upload(torch.ones(4), buffer)

    return snippet


class Layer(RegionModule):
    """A module whose number differs from layer to layer, once in Python and once as a buffer."""

    rows_pow2 = False

    def __init__(self, device: Device, number: int) -> None:
        super().__init__(device.regions)
        self.number = number
        self.register_buffer("scale", device.put([float(number)]))
