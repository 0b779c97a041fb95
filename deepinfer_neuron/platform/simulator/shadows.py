"""Modules as a region sees them: with the CPU tensors behind their buffers and parameters."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from deepinfer_neuron.platform.simulator.device import DeviceTensor, device_tensors, unwrap


@dataclass(frozen=True)
class _Shadow:
    """A shadow with the state that it was made from.

    It keeps the tensors, so that their identities name nothing else; other attributes might lead
    back to the module, which would then live for ever.
    """

    module: nn.Module
    state: list[int]
    tensors: list[DeviceTensor]


class InlineRegions:
    """Runs a region that another region calls, as part of it."""

    def call(self, module: nn.Module, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """The plain call."""
        return function(module, *args)


class Shadows:
    """Makes the shadow of a module once, and again when one of its attributes was replaced."""

    def __init__(self) -> None:
        self._inline = InlineRegions()
        self._known: weakref.WeakKeyDictionary[nn.Module, _Shadow] = weakref.WeakKeyDictionary()

    def of(self, module: nn.Module) -> nn.Module:
        """The shadow of ``module``, sharing memory with it."""
        state, tensors = _state(module)
        known = self._known.get(module)
        if known is None or known.state != state:
            known = _Shadow(self._make(module), state, tensors)
            self._known[module] = known
        return known.module

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


def _state(module: nn.Module) -> tuple[list[int], list[DeviceTensor]]:
    """The identities of all attributes of a module and its children, and their tensors."""
    state: list[int] = []
    tensors: list[DeviceTensor] = []
    for part in module.modules():
        for name, value in vars(part).items():
            if name != "_modules":
                state.append(id(value))
                tensors.extend(device_tensors(value))
    return state + [id(tensor) for tensor in tensors], tensors
