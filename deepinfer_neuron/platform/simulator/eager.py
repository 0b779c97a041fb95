"""Operators that are called on the device's tensors outside regions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from deepinfer_neuron.errors import PlatformError
from deepinfer_neuron.platform.simulator.collectives import run_eager_collective
from deepinfer_neuron.platform.simulator.counts import add_one
from deepinfer_neuron.platform.simulator.device import (
    DeviceTensor,
    device_tensors,
    unwrap,
    wrap,
)
from deepinfer_neuron.platform.simulator.indices import check_indices
from deepinfer_neuron.platform.simulator.operator_rules import broken_rules
from deepinfer_neuron.platform.simulator.operators import (
    FLOAT8,
    TO_HOST,
    base_name,
    describe,
    describe_tensor,
    indexings,
    is_view,
    namespace,
    tensors_in,
    written,
)

if TYPE_CHECKING:
    from deepinfer_neuron.platform.simulator.simulator import Simulator

# Nothing is launched for these: they make tensors, or change what torch knows of one.
_FREE = frozenset(
    {
        "_unsafe_view",
        "empty",
        "empty_like",
        "empty_strided",
        "new_empty",
        "new_empty_strided",
        "record_stream",
        "set",
    }
)
# A wrapper cannot change its shape.
_RESHAPING = frozenset(
    {"resize_", "resize_as_", "set_", "squeeze_", "swapaxes_", "t_", "transpose_", "unsqueeze_"}
)
# Operators that a step may launch by themselves.
_KERNELS = frozenset(
    {
        "_to_copy",
        "add",
        "addmm",
        "argmax",
        "bmm",
        "cat",
        "clone",
        "copy",
        "div",
        "embedding",
        "fill",
        "index_copy",
        "index_select",
        "maximum",
        "minimum",
        "mm",
        "mul",
        "stack",
        "sub",
        "where",
        "zero",
    }
)
_WIDE = frozenset({torch.int64, torch.uint64})


class Eager:
    """Runs operators on held tensors, counts them, and checks their rules.

    Args:
        simulator: the device.
    """

    def __init__(self, simulator: Simulator) -> None:
        self._simulator = simulator
        self._load: set[str] = set()

    @property
    def load_signatures(self) -> int:
        """Distinct operators and shapes that were launched before the first step."""
        return len(self._load)

    def run(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One operator.

        Raises:
            PlatformError: tensors of host and device are mixed, or the wrapper cannot do it.
            DeviceRuleError: a rule is broken and the mode is strict.
        """
        name = base_name(func)
        if namespace(func) in ("c10d", "_c10d_functional"):
            return run_eager_collective(self._simulator, func, args, kwargs)
        if func is torch.ops.aten.copy_.default:
            return self.copy(args[0], args[1], *args[2:], **kwargs)
        if name == "_to_copy":
            return self._to_copy(args[0], kwargs)
        if name in TO_HOST:
            return self._read(func, args, kwargs)
        if func._schema.name.split("::", 1)[1] in _RESHAPING:
            raise PlatformError(
                f"{func} cannot change the shape of a tensor of the simulated device; use the "
                "form that returns a view."
            )
        if is_view(func) or name in _FREE:
            return self._finish(func, args, kwargs)
        return self._launch(func, args, kwargs)

    def created(self, held: Tensor) -> Tensor:
        """A new tensor of the device."""
        if held.dtype in _WIDE or held.dtype == torch.float64:
            self._simulator.violate("D04", f"a new tensor {describe_tensor(held)}")
        return DeviceTensor(held, self._simulator)

    def copy(self, target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        """``target.copy_(source)``: an upload, a download, or a copy on the device."""
        to_device, from_device = (isinstance(x, DeviceTensor) for x in (target, source))
        detail = f"copy_({describe_tensor(target)}, {describe_tensor(source)})"
        if to_device and from_device:
            self._check_copy(target, source, detail)
            self._count("copy_", f"copy_ {describe_tensor(target)}")
        elif to_device:
            self._check_copy(target, source, detail)
            self._uploaded(source, non_blocking, detail)
        else:
            self._downloaded(source, non_blocking, detail)
        unwrap(target).copy_(unwrap(source))
        return target

    def _to_copy(self, source: DeviceTensor, kwargs: dict[str, Any]) -> Tensor:
        place = kwargs.get("device")
        detail = describe("_to_copy", source)
        rest = {name: value for name, value in kwargs.items() if name != "device"}
        if place is not None and torch.device(place).type != "neuron":
            self._downloaded(source, bool(kwargs.get("non_blocking")), detail)
            return source.held.to(device=place, copy=True, **_host_kwargs(rest))
        dtype = kwargs.get("dtype") or source.dtype
        if dtype != source.dtype:
            fp8 = bool({dtype, source.dtype} & FLOAT8)
            self._simulator.violate("D02" if fp8 else "H08", f"{detail} to {dtype}")
        self._count("_to_copy", f"{detail} {dtype}")
        rest.pop("non_blocking", None)
        return self.created(torch.ops.aten._to_copy.default(source.held, **rest))

    def _read(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """An operator whose result is a Python value."""
        self._downloaded(device_tensors(args)[0], False, describe(func, args), single=True)
        return func(*unwrap(args), **unwrap(kwargs))

    def _launch(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._refuse_mixing(func, args, kwargs)
        out = self._finish(func, args, kwargs)
        detail = describe(func, (args, kwargs))
        self._count(base_name(func), detail)
        if self._simulator.checking:
            self._check(func, args, kwargs, out, detail)
        return out

    def _finish(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run ``func`` on the held tensors and put its results on the device."""
        place = kwargs.get("device")
        stays = place is None or torch.device(place).type == "neuron"
        held = {k: v for k, v in unwrap(kwargs).items() if k != "device" or not stays}
        if self._simulator.checking:
            for indexing in indexings(func, unwrap(args), lambda tensor: tensor.shape):
                check_indices(self._simulator, indexing, describe(func, args))
        out = func(*unwrap(args), **held)
        places = written(func)
        if any(place is not None for place in places):
            given = [args[p] if isinstance(p, int) else kwargs.get(str(p)) for p in places]
            return given[0] if len(given) == 1 else tuple(given)
        return wrap(out, self._simulator) if stays else out

    def _check(
        self,
        func: OpOverload,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        out: Any,
        detail: str,
    ) -> None:
        simulator = self._simulator
        for rule in broken_rules(func, args, kwargs, out, simulator.limits):
            simulator.violate(rule, detail)
        tensors = list(tensors_in((args, kwargs, out)))
        if any(tensor.dtype in _WIDE and tensor.dim() > 0 for tensor in tensors):
            simulator.violate("H05", detail)
        copies = base_name(func) == "clone" and not args[0].is_contiguous()
        if copies and tensors[-1].stride() != args[0].stride():
            simulator.violate("H08", f"{detail} of a tensor that is not contiguous")
        if not simulator.in_step:
            return
        if base_name(func) not in _KERNELS:
            simulator.violate("H04", detail)
        if _takes_number(func, args, kwargs):
            simulator.violate("H03", detail)

    def _check_copy(self, target: Tensor, source: Tensor, detail: str) -> None:
        if target.dtype != source.dtype:
            fp8 = bool({target.dtype, source.dtype} & FLOAT8)
            self._simulator.violate("D02" if fp8 else "H08", detail)
        if not target.is_contiguous() and target.numel() > 1:
            self._simulator.violate("H09", detail)

    def _refuse_mixing(self, func: OpOverload, args: Any, kwargs: Any) -> None:
        for tensor in tensors_in((args, kwargs)):
            if not isinstance(tensor, DeviceTensor) and tensor.dim() > 0:
                raise PlatformError(
                    f"{describe(func, (args, kwargs))} mixes tensors of the host and of the "
                    "device; move them to the device first."
                )

    def _uploaded(self, source: Tensor, non_blocking: bool, detail: str) -> None:
        counts = self._simulator.counts
        counts.uploads += 1
        counts.upload_bytes += source.numel() * source.element_size()
        self._copied(non_blocking, f"upload {detail}")

    def _downloaded(
        self, source: Tensor, non_blocking: bool, detail: str, single: bool = False
    ) -> None:
        counts = self._simulator.counts
        counts.downloads += 1
        size = 1 if single else source.numel()
        counts.download_bytes += size * source.element_size()
        self._copied(non_blocking, f"download {detail}")
        if self._simulator.in_step and size * source.element_size() > self._download_limit():
            self._simulator.violate("H11", detail)

    def _download_limit(self) -> int:
        return self._simulator.limits.download_bytes

    def _copied(self, non_blocking: bool, detail: str) -> None:
        if non_blocking:
            return
        self._simulator.counts.blocking += 1
        if self._simulator.in_step:
            self._simulator.violate("H01", f"blocking {detail}")

    def _count(self, name: str, signature: str) -> None:
        counts = self._simulator.counts
        counts.eager += 1
        add_one(counts.by_operator, name)
        if not self._simulator.in_step and self._simulator.steps == 0:
            self._load.add(signature)


def _host_kwargs(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments of ``_to_copy`` that ``Tensor.to`` takes as well."""
    return {name: kwargs[name] for name in ("dtype", "memory_format") if kwargs.get(name)}


def _takes_number(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a Python number stands where the device needs a tensor."""
    for position, argument in enumerate(func._schema.arguments):
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        kind = str(argument.type)
        if kind in ("number", "Tensor") and isinstance(value, int | float):
            return True
        if kind == "Tensor" and isinstance(value, Tensor) and not isinstance(value, DeviceTensor):
            return True
    return False
