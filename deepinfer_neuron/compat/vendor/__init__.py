"""Packages that answer to the names and call signatures of five vendor libraries.

``deep_gemm``, ``flash_mla``, ``flash_attn``, ``deep_select`` and ``tile_kernels`` are thin layers
over :mod:`deepinfer_neuron.ops`. They live under this package; code that says ``import deep_gemm``
finds them after::

    from deepinfer_neuron.compat import vendor
    vendor.install()

``install`` enters them in ``sys.modules`` under their vendor names, so ``from x import y`` works in
modules that are imported later. It refuses to hide a library that is installed for real.
"""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
import sys
from collections.abc import Sequence
from types import ModuleType

from deepinfer_neuron.errors import ConfigError, PlatformError

__all__ = ["NAMES", "install", "uninstall"]

NAMES = ("deep_gemm", "deep_select", "flash_attn", "flash_mla", "tile_kernels")
"""The libraries that have a stand-in."""

_hidden: dict[str, dict[str, ModuleType]] = {}
"""What ``sys.modules`` held under the name of each installed stand-in, and below it."""


def install(names: Sequence[str] = NAMES, *, replace: bool = False) -> None:
    """Make ``import <name>`` find the stand-ins; names that have one already are left alone.

    Args:
        names: some of :data:`NAMES`.
        replace: hide a library of that name that is installed for real; modules that imported it
            before keep it.

    Raises:
        ConfigError: a name has no stand-in.
        PlatformError: a real library has the name and ``replace`` is false. Nothing is installed
            then.
    """
    for name in names:
        if name not in NAMES:
            raise ConfigError(f"{name!r} has no stand-in; choose from {', '.join(NAMES)}.")
        if name not in _hidden and not replace and _is_real(name):
            raise PlatformError(
                f"a package named {name!r} is installed, and the stand-in would hide it; pass "
                "replace=True, or leave the name out of `names`."
            )
    for name in names:
        if name not in _hidden:
            _hidden[name] = _take_out(name)
            sys.modules.update(_stand_ins(name))


def uninstall() -> None:
    """Undo :func:`install`: ``sys.modules`` holds under the names what it held before."""
    for name in list(_hidden):
        _take_out(name)
        sys.modules.update(_hidden.pop(name))


def _is_real(name: str) -> bool:
    """Whether an import of ``name`` would find something now."""
    return sys.modules.get(name) is not None or importlib.util.find_spec(name) is not None


def _take_out(name: str) -> dict[str, ModuleType]:
    """Remove ``name`` and everything below it from ``sys.modules``."""
    found = [key for key in sys.modules if key == name or key.startswith(name + ".")]
    return {key: sys.modules.pop(key) for key in found}


def _stand_ins(name: str) -> dict[str, ModuleType]:
    """The modules of a stand-in under their vendor names."""
    package = importlib.import_module(f"{__name__}.{name}")
    modules = {name: package}
    for found in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        modules[found.name.removeprefix(__name__ + ".")] = importlib.import_module(found.name)
    return modules
