"""How many bytes the parts of a model take on disk and in memory."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from deepinfer_neuron.checkpoint.names import TensorSpec

# Bytes in memory per stored byte once a tensor is expanded to bf16: an e4m3 code becomes one value
# of two bytes, a byte of two e2m1 codes becomes two, and scales are multiplied in and dropped.
_EXPANDED_BYTES = {"F8_E4M3": 2, "I8": 4, "F8_E8M0": 0, "BF16": 1, "F32": 1}

# Bf16 matrices whose products stay fp32: expanding widens them once instead of in every step.
_WIDENED = ("head.weight", ".gate.weight", ".wgate.weight")

_DRAFT_ROLES = frozenset({"draft", "draft_expert", "markov"})
_IMAGE_ROLES = frozenset({"vision", "aligner"})

# Rows of these tables are read from the files when they are needed.
_ON_DISK_ROLE = "engram_table"


@dataclass(frozen=True)
class Part:
    """One component: its tensors, and its bytes on disk and in memory by weights mode."""

    name: str
    tensors: int
    disk: int
    packed: int
    expanded: int


def measure_parts(specs: Iterable[TensorSpec]) -> list[Part]:
    """The components of a checkpoint in order of first appearance, one per role of ``specs``."""
    parts: dict[str, Part] = {}
    for spec in specs:
        old = parts.get(spec.role, Part(spec.role, 0, 0, 0, 0))
        held = 0 if spec.role == _ON_DISK_ROLE else spec.nbytes
        parts[spec.role] = Part(
            name=spec.role,
            tensors=old.tensors + 1,
            disk=old.disk + spec.nbytes,
            packed=old.packed + held,
            expanded=old.expanded + held * _expansion(spec),
        )
    return list(parts.values())


def _expansion(spec: TensorSpec) -> int:
    """Bytes in memory per stored byte once a tensor is expanded."""
    return 2 if spec.name.endswith(_WIDENED) else _EXPANDED_BYTES[spec.dtype]


def text_parts(parts: Iterable[Part], *, drafts: bool) -> list[Part]:
    """The parts that generating text keeps in memory, with or without drafts."""
    unused = _IMAGE_ROLES if drafts else _IMAGE_ROLES | _DRAFT_ROLES
    return [part for part in parts if part.name not in unused]


def total(parts: Iterable[Part]) -> Part:
    """The sum of ``parts``."""
    parts = list(parts)
    return Part(
        name="total",
        tensors=sum(part.tensors for part in parts),
        disk=sum(part.disk for part in parts),
        packed=sum(part.packed for part in parts),
        expanded=sum(part.expanded for part in parts),
    )
