"""Modules as a region sees them: with the CPU tensors behind their buffers and parameters."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from deepinfer_neuron.platform.simulator.device import DeviceTensor, device_tensors, unwrap


class InlineRegions:
    """Runs a region that another region calls, as part of it."""

    def call(self, module: nn.Module, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """The plain call."""
        return function(module, *args)


class Shadows:
    """Makes the shadow of a module once, and again when one of its tensors was replaced."""

    def __init__(self) -> None:
        self._inline = InlineRegions()
        self._known: weakref.WeakKeyDictionary[nn.Module, tuple[nn.Module, list[DeviceTensor]]] = (
            weakref.WeakKeyDictionary()
        )

    def of(self, module: nn.Module) -> nn.Module:
        """The shadow of ``module``, sharing memory with it."""
        tensors = _tensors(module)
        known = self._known.get(module)
        if known is not None and len(known[1]) == len(tensors):
            same = all(a is b for a, b in zip(known[1], tensors, strict=True))
            if same:
                return known[0]
        shadow = self._make(module)
        self._known[module] = (shadow, tensors)
        return shadow

    def _make(self, module: nn.Module) -> nn.Module:
        shadow: nn.Module = object.__new__(type(module))
        for name, value in vars(module).items():
            if name == "_modules":
                value = {key: self._child(child) for key, child in value.items()}
            elif name == "regions":
                value = self._inline
            elif name == "_parameters":
                value = {key: _parameter(item) for key, item in value.items()}
            elif isinstance(value, torch.device):
                value = torch.device("cpu")
            else:
                value = unwrap(value)
            shadow.__dict__[name] = value
        return shadow

    def _child(self, child: nn.Module | None) -> nn.Module | None:
        return None if child is None else self._make(child)


def _parameter(value: Any) -> Any:
    held = unwrap(value)
    return held if held is None else nn.Parameter(held, requires_grad=False)


def _tensors(module: nn.Module) -> list[DeviceTensor]:
    """Every tensor of the device that a module holds, in a fixed order."""
    found: list[DeviceTensor] = []
    for part in module.modules():
        for name, value in vars(part).items():
            if name != "_modules":
                found.extend(device_tensors(value))
    return found
