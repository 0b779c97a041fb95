"""Builds and calls the fused loops in ``loops/``.

The loops are compiled once per machine with the system's C++ compiler. They use the OpenMP
threads that torch already started, so the library is linked without a runtime of its own.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from deepinfer_neuron.errors import PlatformError

_SOURCES = Path(__file__).parent / "loops"
_FLAGS = (
    "-O3",
    "-march=native",
    "-fopenmp",
    "-fPIC",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=fast",
    "-std=c++17",
)
_SUFFIX = {torch.float32: "_f32", torch.bfloat16: "_bf16"}

ACTIVATION, COMPRESSED_KEY, INDEX_OPERAND = range(3)
"""Run-time number formats: e4m3 per 32, e2m1 with e4m3 scales per 16, e2m1 per 32."""


class Block(ctypes.Structure):
    """Geometry of a block of attention logits ``[batch, queries, heads, near + far]``."""

    _fields_ = (
        ("batch", ctypes.c_int64),
        ("queries", ctypes.c_int),
        ("heads", ctypes.c_int),
        ("near", ctypes.c_int),
        ("far", ctypes.c_int),
        ("first_query", ctypes.c_int),
        ("first_near", ctypes.c_int),
        ("window", ctypes.c_int),
        ("far_stride_row", ctypes.c_int),
        ("far_stride_batch", ctypes.c_int64),
    )


def available() -> bool:
    """Whether this machine has the C++ compiler that the loops need."""
    return shutil.which("g++") is not None


@cache
def library() -> ctypes.CDLL:
    """The compiled loops.

    Raises:
        PlatformError: there is no C++ compiler, or it refuses the source.
    """
    if not available():
        raise PlatformError("training needs the C++ compiler g++; install it and start again.")
    key = hashlib.sha256(repr((_FLAGS, platform.processor())).encode())
    for source in sorted(_SOURCES.iterdir()):
        key.update(source.read_bytes())
    folder = Path(tempfile.gettempdir()) / f"train_demo_kernels_{os.getuid()}"
    folder.mkdir(exist_ok=True)
    target = folder / f"{key.hexdigest()[:16]}.so"
    if not target.exists():
        _build(target)
    return ctypes.CDLL(str(target))


def _build(target: Path) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        objects, built = Path(scratch) / "kernels.o", Path(scratch) / "kernels.so"
        for command in (
            ["g++", *_FLAGS, "-c", str(_SOURCES / "loops.cpp"), "-o", str(objects)],
            ["g++", "-shared", "-o", str(built), str(objects)],
        ):
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise PlatformError(f"the compiler refused the training loops: {done.stderr}")
        partial = target.with_suffix(f".{os.getpid()}")
        shutil.copy(built, partial)
        partial.replace(target)


Argument = Tensor | Block | int | float | None


def call(name: str, dtype: torch.dtype | None, *arguments: Argument) -> None:
    """Run a loop on contiguous tensors; the element type picks the variant.

    Every integer goes over as 64 bits; a loop that wants 32 reads the lower half.
    """
    function = getattr(library(), name + ("" if dtype is None else _SUFFIX[dtype]))
    converted: list[object] = []
    for argument in arguments:
        if isinstance(argument, Tensor):
            assert argument.is_contiguous(), name
            converted.append(ctypes.c_void_p(argument.data_ptr()))
        elif isinstance(argument, Block):
            converted.append(ctypes.byref(argument))
        elif argument is None:
            converted.append(ctypes.c_void_p(None))
        elif isinstance(argument, float):
            converted.append(ctypes.c_float(argument))
        else:
            converted.append(ctypes.c_int64(argument))
    function(*converted)
