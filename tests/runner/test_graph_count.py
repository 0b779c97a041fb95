"""The planned graphs are those that a warm-up leaves behind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from deepinfer_neuron.checkpoint.config import parse_config
from deepinfer_neuron.checkpoint.reader import Checkpoint
from deepinfer_neuron.checkpoint.tiny import write_checkpoint
from deepinfer_neuron.model.shapes import PassShape
from deepinfer_neuron.platform.regions import CompiledBackend, PlainBackend, RegionKey, Signature
from deepinfer_neuron.runner.buckets import Ladder
from deepinfer_neuron.runner.graph_count import decode_launches, planned_graphs
from deepinfer_neuron.runner.static_worker import StaticWorker
from deepinfer_neuron.runner.warm_up import warm_up
from tests.conftest import OpenCheckpoint
from tests.support.released import released_config
from tests.support.static_runs import static_worker

# Sequences, rows of a decode pass, rows of a prompt pass, table widths.
LADDERS = {
    "one row": ((1,), (1,), (1,), (1,)),
    "narrow and wide tables": ((1, 2), (8,), (16,), (1, 2, 4)),
    "sequences": ((1, 2, 4), (8,), (8, 64), (2,)),
    "rows": ((1,), (1, 2, 4, 8), (1, 2, 4), (1,)),
}


@pytest.mark.parametrize("nextn", [0, 5])
@pytest.mark.parametrize("name", LADDERS)
def test_the_plan_equals_the_registry(
    name: str, nextn: int, open_checkpoint: OpenCheckpoint
) -> None:
    sequences, rows, prompts, widths = LADDERS[name]
    rows = rows if nextn < rows[-1] else (8,)  # A sequence needs 1 + nextn of them.
    checkpoint = open_checkpoint("nano")
    ladder = Ladder(sequences, rows, prompts, widths, nextn)
    worker = static_worker(checkpoint, ladder)
    done = warm_up(worker)
    expected = planned_graphs(checkpoint.config, ladder, nextn)
    assert Counter(str(record.key) for record in worker.regions.records) == expected
    assert sum(expected.values()) == len(worker.regions.records) == done.graphs


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Checkpoint]:
    """Forty layers in the released order, each as small as those of nano."""
    overrides = {
        "num_hidden_layers": 40,
        "compress_ratios": [0, 0] + [2] * 18 + [1] * 20 + [0, 0],
        "kv_source_layer_ids": [2, 8, 14, 20],
        "index_source_layer_ids": [2, 8, 14, 20, 24, 28, 32, 36],
        "candidate_source_layer_id": 20,
        "engram_layer_ids": [1, 14],
        "dspark_target_layer_ids": [37, 39],
    }
    directory = tmp_path_factory.mktemp("deep") / "nano-40"
    with Checkpoint.open(write_checkpoint(directory, "nano", overrides=overrides)) as checkpoint:
        yield checkpoint


def graphs(worker: StaticWorker) -> Counter[str]:
    """Graphs by region."""
    return Counter(str(record.key) for record in worker.regions.records)


@pytest.mark.parametrize("nextn", [0, 5])
def test_forty_layers_need_the_graphs_of_nine(
    nextn: int, deep: Checkpoint, open_checkpoint: OpenCheckpoint
) -> None:
    ladder = Ladder((1, 2), (8,), (16,), (1, 2), nextn)
    shallow = open_checkpoint("nano")
    assert (len(shallow.config.layers), len(deep.config.layers)) == (9, 40)
    workers = [static_worker(checkpoint, ladder) for checkpoint in (shallow, deep)]
    for worker in workers:
        warm_up(worker)
    assert graphs(workers[0]) == graphs(workers[1])
    assert graphs(workers[1]) == planned_graphs(deep.config, ladder, nextn)


class Log(PlainBackend):
    """Runs regions plainly and notes which."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def run(
        self,
        key: RegionKey,
        signature: Signature,
        function: Callable[..., Any],
        module: nn.Module,
        args: tuple[Any, ...],
    ) -> Any:
        self.names.append(str(key))
        return super().run(key, signature, function, module, args)


def decode(worker: StaticWorker) -> PassShape:
    """One step of two sequences; returns its shape."""
    (shape,) = worker.ladder.decode_passes()
    worker.verify(worker.queue([], shape), 0)
    return shape


def test_regions_of_a_decode_step(deep: Checkpoint, open_checkpoint: OpenCheckpoint) -> None:
    for checkpoint in (open_checkpoint("nano"), deep):
        log, layers = Log(), len(checkpoint.config.layers)
        worker = static_worker(checkpoint, Ladder((2,), (8,), (16,), (1,), 5), log)
        shape = decode(worker)
        assert tuple(log.names) == decode_launches(checkpoint.config, shape, 5)
        # Two per layer and two Engram updates; metadata, embedding, key update of the drafts,
        # verification; beginning, embedding, two draft layers, chain.
        assert len(log.names) == worker.regions.calls == 2 * layers + 2 + 4 + 5
        assert len(log.names) <= 3 * layers + 10
        bare = static_worker(checkpoint, Ladder((2,), (1,), (16,), (1,)))
        shape = decode(bare)
        assert bare.regions.calls == len(decode_launches(checkpoint.config, shape, 0))
        assert bare.regions.calls == 2 * layers + 2 + 4


def test_regions_of_a_decode_step_of_the_released_model() -> None:
    config = parse_config(released_config(), "config.json")
    found = Counter(decode_launches(config, PassShape(1, 8, 128, 6), 5))
    attention = {name: count for name, count in found.items() if "Attention" in name}
    assert sorted(attention.values()) == [1, 2, 3, 4, 30]
    assert found["LayerMixture.mix"] == sum(attention.values()) == 40
    assert (found["StaticEngram.remember"], found["StaticDraftLayer.draft"]) == (2, 3)
    once = [name for name, count in found.items() if count == 1 and name not in attention]
    assert len(once) == 5
    assert found["Embedding.start"] == 2
    assert found.total() == 2 * 40 + 2 + 3 + 5 + 2 <= 3 * 40 + 10


@pytest.mark.slow
def test_captured_graphs_do_not_grow_with_the_layers(
    deep: Checkpoint, open_checkpoint: OpenCheckpoint
) -> None:
    """torch.compile captures as many graphs as the registry counts signatures, and forty layers
    find the graphs of nine."""
    torch._dynamo.reset()
    captured: list[fx.GraphModule] = []

    def capture(graph: fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        captured.append(graph)
        return graph.forward

    backend = CompiledBackend(capture)
    ladder = Ladder((2,), (8,), (16,), (1,), 5)
    shallow = static_worker(open_checkpoint("nano"), ladder, backend)
    decode(shallow)
    # One per region: five of attention, ten others.
    assert len(captured) == len(shallow.regions.records) == 15
    worker = static_worker(deep, ladder, backend)
    decode(worker)
    assert len(captured) == len(worker.regions.records) == 15
    torch._dynamo.reset()
