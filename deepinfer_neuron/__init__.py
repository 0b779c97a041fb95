"""Inference engine for DeepSeek-V4.1 checkpoints on AWS Trainium and on CPUs.

>>> from deepinfer_neuron import LLM, SamplingParams

The names below are loaded on first use, so importing the package alone is quick.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from deepinfer_neuron.llm import LLM, ChatOptions, RequestOutput
    from deepinfer_neuron.sampling.params import SamplingParams
    from deepinfer_neuron.sampling.structured import StructuredOutput

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "ChatOptions",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutput",
    "__version__",
]

_HOMES = {
    "LLM": "deepinfer_neuron.llm",
    "ChatOptions": "deepinfer_neuron.llm",
    "RequestOutput": "deepinfer_neuron.llm",
    "SamplingParams": "deepinfer_neuron.sampling.params",
    "StructuredOutput": "deepinfer_neuron.sampling.structured",
}


def __getattr__(name: str) -> object:
    """Import the module that defines the public name ``name`` and return that name."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    """The module's names, including those not loaded yet."""
    return sorted({*globals(), *__all__})
