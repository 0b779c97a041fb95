"""Which routed experts a step uses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from deepinfer_neuron.model.blocks import MixtureOfExperts
from deepinfer_neuron.ops.moe import route
from deepinfer_neuron.runner.worker import Worker


class ExpertRecord:
    """Experts used so far, as pairs of layer and expert."""

    def __init__(self) -> None:
        self.used: set[tuple[int, int]] = set()

    def add(self, layer: int, moe: MixtureOfExperts, y: Tensor) -> None:
        """Note the experts that the rows ``[n, D]`` choose, by routing them once more."""
        config = moe.config
        chosen, _ = route(
            y, moe.gate.weight, moe.bias, config.num_experts_per_tok,
            config.routed_scaling_factor, moe.arithmetic,
        )  # fmt: skip
        self.used.update((layer, int(expert)) for expert in chosen.unique())

    def by_layer(self, layers: int) -> tuple[tuple[int, ...], ...]:
        """The experts of each layer, ascending."""
        return tuple(
            tuple(sorted(expert for layer, expert in self.used if layer == wanted))
            for wanted in range(layers)
        )


@contextmanager
def recorded_experts(worker: Worker) -> Iterator[ExpertRecord]:
    """Record the experts of every step that runs inside; such a step takes longer."""
    record = ExpertRecord()
    layers = [m for m in worker.network.modules() if isinstance(m, MixtureOfExperts)]
    hooks = [moe.register_forward_pre_hook(_note(record, i)) for i, moe in enumerate(layers)]
    try:
        yield record
    finally:
        for hook in hooks:
            hook.remove()


def _note(record: ExpertRecord, layer: int) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
    """A hook that sees the input of one layer's experts."""

    def note(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        if isinstance(module, MixtureOfExperts):
            record.add(layer, module, inputs[0])

    return note
