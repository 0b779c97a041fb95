"""Lowering of regions: what is lifted, what comes back, and what the scan finds."""

from __future__ import annotations

import sys
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

from deepinfer_neuron.errors import PlatformError
from deepinfer_neuron.platform.lowering import execute, lower, scan
from deepinfer_neuron.platform.regions import RegionModule, Regions, region
from tests.support.lowered import Stateless, check_function, check_region, within

needs_packages = pytest.mark.slow


class Sizes(NamedTuple):
    """Stands for a frozen dataclass of sizes."""

    factor: float


class Layer(RegionModule):
    """Parameters, buffers, a cache that is written to, and a tensor that is not read."""

    def __init__(self, seed: int) -> None:
        super().__init__(Regions())
        generator = torch.Generator().manual_seed(seed)
        self.weight = nn.Parameter(torch.randn(8, 4, generator=generator))
        self.unread = nn.Parameter(torch.zeros(3))
        self.register_buffer("calls", torch.zeros(1))
        self.table = torch.ones(4)
        self.calls: Tensor

    @region
    def step(self, x: Tensor, state: tuple[Tensor, Tensor], sizes: Sizes) -> tuple[Tensor, None]:
        cache, places = state
        rows = (x @ self.weight) * sizes.factor
        cache.index_put_((places,), rows)
        self.calls.add_(1.0)
        return cache.sum(0), None

    @region
    def attribute(self, x: Tensor) -> Tensor:
        return x + self.table

    @region
    def counted(self, x: Tensor) -> Tensor:
        return x[x > 0]


def arguments() -> tuple[Tensor, tuple[Tensor, Tensor], Sizes]:
    x = torch.arange(16.0).view(2, 8) / 8
    return x, (torch.ones(5, 4), torch.tensor([3, 1], dtype=torch.int32)), Sizes(2.0)


@needs_packages
class TestLowering:
    """With torch-mlir and XLA."""

    def test_state_is_input_and_mutations_are_outputs(self) -> None:
        close = within(1e-5)
        lowered = check_region(Layer.step, Layer(0), arguments(), close)
        assert lowered.inputs == (
            "module.weight", "module.calls", "args.0", "args.1", "args.2",
        )  # fmt: skip
        assert lowered.mutated == ("module.calls", "args.1")

    def test_layers_of_a_kind_share_their_text(self) -> None:
        texts = {lower(Layer.step, Layer(seed), arguments()).text for seed in range(3)}
        assert len(texts) == 1

    def test_tensors_that_are_no_state_are_refused(self) -> None:
        with pytest.raises(PlatformError, match="register them as buffers"):
            lower(Layer.attribute, Layer(0), (torch.ones(4),))

    def test_shapes_that_depend_on_data_are_refused(self) -> None:
        with pytest.raises(
            PlatformError, match=r"Layer\.counted makes a tensor whose shape depends"
        ):
            lower(Layer.counted, Layer(0), (torch.ones(4),))

    def test_what_cannot_be_lowered_names_the_region(self) -> None:
        def shifted(module: nn.Module, x: Tensor) -> Tensor:
            return x >> 3

        with pytest.raises(PlatformError, match="shifted cannot be lowered"):
            lower(shifted, Stateless(), (torch.arange(4, dtype=torch.int32),))

    def test_data_dependent_branches_are_refused(self) -> None:
        def branch(module: nn.Module, x: Tensor) -> Tensor:
            return x if bool(x.sum() > 0) else -x

        with pytest.raises(PlatformError, match="branch cannot be traced"):
            lower(branch, Stateless(), (torch.ones(4),))

    def test_every_type_of_a_region_runs(self) -> None:
        values = [torch.tensor([0, 1, 2]).to(dtype) for dtype in (torch.uint8, torch.int32)]
        values += [torch.tensor([-0.0, 1.5, -2.0]).to(d) for d in (torch.bfloat16, torch.float32)]
        values += [torch.tensor([True, False, True])]
        check_function(lambda *given: tuple(v.flip(0) for v in given), *values)

    def test_wide_inputs_are_refused(self) -> None:
        args = (torch.arange(3),)
        lowered = lower(lambda module, x: x.to(torch.int32), Stateless(), args)
        assert "i64: input or output" in scan(lowered.text)
        with pytest.raises(PlatformError, match="32-bit"):
            execute(lowered, Stateless(), args)

    def test_scan_of_real_text(self) -> None:
        def findings(function: object) -> tuple[str, ...]:
            return scan(lower(function, Stateless(), (torch.randn(4, 6),)).text)  # type: ignore[arg-type]

        assert findings(lambda m, x: x.double().exp().float()) == (
            "f64: convert", "f64: exponential",
        )  # fmt: skip
        assert "i64: add" in findings(lambda m, x: (x.to(torch.int64) + 1).to(torch.int32))
        assert findings(lambda m, x: x.topk(2).indices.to(torch.int32)) == ("sort with a payload",)
        assert findings(lambda m, x: x.topk(2).values) == ()
        assert findings(lambda m, x: x[:, ::2] + x[:, 1::2]) == ("slice with a step",)
        assert "float8: convert" in findings(lambda m, x: x.to(torch.float8_e4m3fn).float())


class TestScan:
    """Texts written by hand; no package is needed."""

    @pytest.mark.parametrize(
        ("line", "finding"),
        [
            ("%0 = stablehlo.add %a, %b : tensor<4xf64>", "f64: add"),
            ("%0 = stablehlo.multiply %a, %b : tensor<2x2xi64>", "i64: multiply"),
            (
                "%0 = stablehlo.convert %a : (tensor<4xf32>) -> tensor<4xf8E4M3FN>",
                "float8: convert",
            ),
            ("%0 = stablehlo.abs %a : (tensor<4xcomplex<f32>>) -> tensor<4xf32>", "complex: abs"),
            ("%0 = stablehlo.abs %a : tensor<?x4xf32>", "dynamic shape: abs"),
            (
                "%0 = stablehlo.dynamic_iota %a, dim = 0 : tensor<4xi32>",
                "dynamic shape: dynamic_iota",
            ),
            ('%1:2 = "stablehlo.sort"(%a, %b) <{is_stable = true}> ({', "sort with a payload"),
            (
                "%0 = stablehlo.slice %a [0:8, 0:6:2] : (tensor<8x6xf32>) -> tensor<8x3xf32>",
                "slice with a step",
            ),
            (
                "%0 = stablehlo.dot_general %a, %b, contracting_dims = [1] x [0] : "
                "(tensor<2x4xi32>, tensor<4x4xi32>) -> tensor<2x4xi32>",
                "product of integers",
            ),
            ("func.func @main(%arg0: tensor<i64>) -> tensor<f32> {", "i64: input or output"),
        ],
    )
    def test_finds(self, line: str, finding: str) -> None:
        assert scan(line) == (finding,)

    @pytest.mark.parametrize(
        "line",
        [
            "%c = stablehlo.constant dense<1.0> : tensor<1xf64>",
            "%0 = stablehlo.slice %a [0:8, 2:6] : (tensor<8x6xf32>) -> tensor<8x4xf32>",
            "%0 = stablehlo.iota dim = 1 : tensor<4x6xi64>",
            "%0 = stablehlo.dynamic_slice %a, %b, sizes = [2] : tensor<2xf32>",
            '%1 = "stablehlo.sort"(%a) <{is_stable = false}> ({',
            "%0 = stablehlo.add %a, %b : tensor<4xbf16>",
        ],
    )
    def test_passes(self, line: str) -> None:
        assert scan(line) == ()

    def test_types_behind_a_body_belong_to_its_operation(self) -> None:
        text = '%1 = "stablehlo.reduce_window"(%a) ({\n  stablehlo.return %2 : tensor<i64>\n'
        assert scan(text + "}) : (tensor<4xi64>) -> tensor<4xi64>") == ("i64: reduce_window",)

    def test_findings_are_not_repeated(self) -> None:
        assert scan("\n".join(["%0 = stablehlo.add %a, %b : tensor<4xf64>"] * 3)) == ("f64: add",)


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch_mlir.fx", None)
    with pytest.raises(PlatformError, match=r"torch-mlir.*deepinfer-neuron\[lowering\]"):
        lower(Layer.step, Layer(0), arguments())
