"""The planned graphs are those that a warm-up leaves behind."""

from __future__ import annotations

from collections import Counter

import pytest

from deepinfer_neuron.runner.buckets import Ladder
from deepinfer_neuron.runner.graph_count import planned_graphs
from deepinfer_neuron.runner.warm_up import warm_up
from tests.conftest import OpenCheckpoint
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
