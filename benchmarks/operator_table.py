"""The case builders of all operators, by the name of the operator."""

from __future__ import annotations

from benchmarks import operator_drafts, operator_keys, operator_rows, operator_steps
from benchmarks.operator_cases import Builder
from deepinfer_neuron.compat import tilelang_ops

_SUFFIX = "_tl"
_MODULES = (operator_keys, operator_steps, operator_drafts, operator_rows)


def _builder(name: str) -> Builder | None:
    """The function of that name in the modules of the cases."""
    return next((getattr(m, name) for m in _MODULES if hasattr(m, name)), None)


_FOUND = {name: _builder(name) for name in (n.removesuffix(_SUFFIX) for n in tilelang_ops.__all__)}

CASES: dict[str, Builder] = {name: found for name, found in _FOUND.items() if found is not None}
"""Builders by operator, in alphabetical order."""

MISSING = [name for name, found in _FOUND.items() if found is None]
"""Operators without a case."""
