"""Stand-ins appear under their vendor names, and go away again."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from deepinfer_neuron.compat import vendor
from deepinfer_neuron.errors import ConfigError, PlatformError

PATHS = (
    "deep_gemm",
    "deep_gemm.locality_domain",
    "flash_mla",
    "flash_mla.flash_mla_interface",
    "flash_attn.cute.interface",
    "deep_select.interface",
    "tile_kernels.config",
    "tile_kernels.quant",
    "tile_kernels.torch.engram",
    "tile_kernels.moe",
    "tile_kernels.engram",
    "tile_kernels.transform",
    "tile_kernels.utils",
    "tile_kernels.mhc.expand_kernel",
    "tile_kernels.mhc.head_compute_mix_kernel",
    "tile_kernels.mhc.norm_fn_kernel",
    "tile_kernels.mhc.post_kernel",
    "tile_kernels.mhc.pre_apply_mix_kernel",
    "tile_kernels.mhc.pre_big_fuse_kernel",
    "tile_kernels.mhc.pre_split_mixes_kernel",
    "tile_kernels.mhc.sinkhorn_kernel",
)


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    before = dict(sys.modules)
    yield
    vendor.uninstall()
    for name in vendor.NAMES:
        assert sys.modules.get(name) is before.get(name)


def test_every_path_can_be_imported() -> None:
    before = set(sys.modules)
    vendor.install()
    for path in PATHS:
        own = f"{vendor.__name__}.{path}"
        assert importlib.import_module(path) is importlib.import_module(own)
    from deep_gemm import tf32_hc_prenorm_gemm
    from tile_kernels.torch import cast, cast_back

    assert callable(tf32_hc_prenorm_gemm)
    assert callable(cast)
    assert callable(cast_back)
    vendor.uninstall()
    assert not [name for name in set(sys.modules) - before if name.split(".")[0] in vendor.NAMES]
    vendor.uninstall()


def test_installing_twice_and_one_by_one() -> None:
    vendor.install(["flash_attn"])
    module = sys.modules["flash_attn"]
    assert "deep_gemm" not in sys.modules
    vendor.install()
    vendor.install()
    assert sys.modules["flash_attn"] is module
    assert "deep_gemm" in sys.modules


def test_unknown_names() -> None:
    with pytest.raises(ConfigError, match="'deep_ep' has no stand-in"):
        vendor.install(["deep_ep"])


@pytest.mark.parametrize("loaded", [True, False])
def test_a_real_package_is_not_hidden(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loaded: bool
) -> None:
    (tmp_path / "flash_attn").mkdir()
    (tmp_path / "flash_attn" / "__init__.py").write_text("REAL = True\n")
    (tmp_path / "flash_attn" / "inner.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    names = ["flash_attn", "flash_attn.inner"]
    real = [importlib.import_module(name) for name in names] if loaded else []
    try:
        with pytest.raises(PlatformError, match="'flash_attn' is installed"):
            vendor.install()
        assert "deep_gemm" not in sys.modules
        vendor.install(replace=True)
        assert not hasattr(importlib.import_module("flash_attn"), "REAL")
        assert "flash_attn.inner" not in sys.modules
        vendor.uninstall()
        assert importlib.import_module("flash_attn").REAL
        if loaded:
            assert [sys.modules[name] for name in names] == real
    finally:
        for name in names:
            sys.modules.pop(name, None)
