"""What the caches hold, byte for byte, and whose it is.

The expected bytes are made from the reference's keys by the definition of the formats.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from deepinfer_neuron.reference import Network
from deepinfer_neuron.reference.attention import Attention, rope_frequencies, rotate
from deepinfer_neuron.reference.weights import Weights
from deepinfer_neuron.runner.worker import Worker
from tests.conftest import OpenCheckpoint
from tests.support.engine_runs import (
    Request,
    Sides,
    cached_records,
    differing,
    fixed_order,
    free_order,
    random_ids,
    run_alone,
    run_step,
    spans,
)
from tests.support.fed_layers import Given, feed, reference_layers
from tests.support.prompt_lengths import Case, cases
from tests.support.record_bytes import (
    E2M1,
    E4M3,
    Record,
    compressed_record,
    index_record,
    parse,
    window_record,
)

FIXED_CASES = [case for case in cases("nano", longest=131) if case.length > 30][::2]
FREE_CASES = [*cases("nano", longest=129)[-4:], *cases("tiny", longest=131)[-5::3]]


def expected_records(
    network: Network, given: Sequence[Given], ring: int
) -> tuple[dict[str, Record], dict[str, Tensor]]:
    """The records of a whole sequence by layer and kind; fp32 values for open pairs.

    ``ring`` is the number of window keys that are kept.
    """
    records, pairs = {}, {}
    for spec, layer in zip(network.config.layers, given, strict=True):
        weights = Weights(network.checkpoint, f"layers.{spec.index}.")
        part = weights.below("attn.")
        block = Attention(network.config, spec, part, network.rounding, network.ops)
        frequency = rope_frequencies(network.config, compressed=spec.ratio > 0)
        bf16, name, shared = network.rounding.bf16, f"layer {spec.index}", layer.record.shared

        collapsed = network.collapse(layer.entered, layer.record.pre_in)
        x = block.norm(collapsed, weights.plain("attn_norm.weight"))
        key = block.linear(network.rounding.activation(x), part.fp8("wkv"))
        key = block.norm(key, part.plain("kv_norm.weight"))
        key = bf16(rotate(key, torch.arange(len(x)), frequency))
        records[f"{name} window"] = window_record(key[-ring:])
        if not spec.owns_kv:
            continue
        position = spec.ratio * torch.arange(len(shared.latent))
        compressed = bf16(rotate(shared.latent, position, frequency))
        records[f"{name} compressed"] = compressed_record(compressed)
        index = block.linear(shared.latent, part.plain("indexer.wk.weight"))
        index = block.norm(index, part.plain("indexer.k_norm.weight"))
        records[f"{name} index"] = index_record(bf16(rotate(index, position, frequency)))
        if spec.ratio == 2:
            last = [part.plain(f"compressor.{w}.weight") for w in ("wgate", "wkv")]
            pairs[f"{name} pairs"] = torch.stack([network.ops.matmul(x[-2:], w) for w in last], 1)
    return records, pairs


def parsed(name: str, records: Tensor, network: Network) -> Record:
    """The engine's bytes of one layer and kind, taken apart."""
    config = network.config
    channels, group, magnitudes = {
        "window": (config.head_dim, 32, E4M3),
        "compressed": (config.head_dim, 16, E2M1),
        "index": (config.index_head_dim, 32, E2M1),
    }[name.split()[-1]]
    return parse(records, channels, group, magnitudes)


def filled(sides: Sides, case: Case) -> tuple[dict[str, Tensor], list[Given]]:
    """The engine's records of a prompt whose layers were fed, and what they were fed with."""
    ids = random_ids(sides.network.checkpoint, case.length)
    given, _ = reference_layers(sides.network, ids)
    feed(sides, ids, given, case.cuts)
    return cached_records(sides.worker, Request.alone(ids), case.length), given


def test_definition_of_the_records() -> None:
    """Worked by hand: ties, saturation, exact powers of two, signs of zero, a group of zeros."""
    values = torch.zeros(1, 32)
    values[0, :8] = torch.tensor([6.0, 0.25, -0.75, 1.25, 5.0, -0.0, 2.5, -1.75])
    index = index_record(values)
    assert index.scales.tolist() == [[127]]  # amax is exactly 6 * 2^0
    assert index.codes[0, :8].tolist() == [7, 0, 8 + 2, 2, 6, 8, 4, 8 + 4]
    assert index_record(values * 1.125).scales.tolist() == [[128]]

    assert window_record(torch.zeros(1, 32)).scales.tolist() == [[127 - 22]]  # 1e-4 / 448
    window = window_record(values * (448 / 6))
    assert window.scales.tolist() == [[127]]
    assert window.codes[0, 0] == 0x7E  # 448

    compressed = compressed_record(values[:, :16] * 0.984375)
    assert compressed.scales.tolist() == [[0x38]]  # 0.984375 is a tie between 0.9375 and 1
    assert compressed_record(values[:, :16] * 1000).codes[0, 0] == 7  # 6000 saturates at 6 * 448


def exact_case(sides: Sides, case: Case) -> list[str]:
    """Names of the records that differ in any byte."""
    found, given = filled(sides, case)
    expected, pairs = expected_records(sides.network, given, sides.worker.geometry.window_ring)
    assert found.keys() == expected.keys() | pairs.keys()
    wrong = [name for name, state in pairs.items() if not torch.equal(found[name], state)]
    for name, record in expected.items():
        mine = parsed(name, found[name], sides.network)
        same_scales = np.array_equal(mine.scales, record.scales)
        if not (same_scales and np.array_equal(mine.codes, record.codes)):
            wrong.append(name)
    return wrong


@pytest.mark.parametrize("case", FIXED_CASES, ids=str)
def test_same_order_gives_the_same_bytes(open_checkpoint: OpenCheckpoint, case: Case) -> None:
    checkpoint = open_checkpoint(case.preset, case.seed, case.wild)
    assert exact_case(fixed_order(checkpoint), case) == []


def test_an_entry_at_its_last_token_is_seen(
    open_checkpoint: OpenCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rotation by the group's last position changes every compressed and index record."""
    sides = fixed_order(open_checkpoint("nano", 0, wild=True))
    original = sides.worker.network.turns

    def faulty(step):
        turns = original(step)
        later = sides.worker.network.compressed_table[step.entries[2].positions + 1]
        return replace(turns, entries={**turns.entries, 2: later})

    monkeypatch.setattr(sides.worker.network, "turns", faulty)
    wrong = exact_case(sides, Case("nano", 0, True, 20, ()))
    assert wrong == [f"layer {i} {kind}" for i in (2, 4) for kind in ("compressed", "index")]


def test_any_order_gives_nearly_the_same_bytes(open_checkpoint: OpenCheckpoint) -> None:
    """Sums that end on another side of a boundary move a code to its neighbour, and rarely."""
    codes = {kind: [0, 0] for kind in ("window", "compressed", "index")}
    scales = {kind: [0, 0] for kind in codes}
    for case in FREE_CASES:
        sides = free_order(open_checkpoint(case.preset, case.seed, case.wild))
        found, given = filled(sides, case)
        expected, _ = expected_records(sides.network, given, sides.worker.geometry.window_ring)
        for name, record in expected.items():
            mine, kind = parsed(name, found[name], sides.network), name.split()[-1]
            moved = np.abs(mine.scales - record.scales)
            assert moved.max(initial=0) <= 1, name
            # Codes under another scale cannot be compared.
            same = np.repeat(moved == 0, mine.codes.shape[1] // moved.shape[1], axis=1)
            step = np.abs(mine.order - record.order)[same]
            assert step.max(initial=0) <= 1, name
            for counts, changed in ((codes, step), (scales, moved)):
                counts[kind][0] += int((changed > 0).sum())
                counts[kind][1] += changed.size
    for counts in (codes, scales):
        for kind, (changed, total) in counts.items():
            assert changed < 1e-3 * total, f"{changed} of {total} {kind} codes"


@pytest.mark.parametrize("cuts", [(1,), (9, 10, 76), (64, 128), tuple(range(120, 140))], ids=str)
def test_cuts_leave_no_trace(open_checkpoint: OpenCheckpoint, cuts: tuple[int, ...]) -> None:
    worker = fixed_order(open_checkpoint("nano", 1, wild=True)).worker
    ids = random_ids(open_checkpoint("nano", 1, wild=True), 140)
    run_alone(worker, ids)
    whole = cached_records(worker, Request.alone(ids), len(ids))
    run_alone(worker, ids, cuts)
    assert differing(cached_records(worker, Request.alone(ids), len(ids)), whole) == []


def fill(worker: Worker, byte: int) -> None:
    """Overwrite all caches; fp32 states become NaN."""
    for cache in worker.caches:
        cache.window.records.fill_(byte)
        if cache.compressed is not None:
            cache.compressed.records.fill_(byte)
        if cache.index is not None:
            cache.index.blocks.fill_(byte)
        if cache.pairs is not None:
            cache.pairs.state.fill_(torch.nan)


def run_chunks(worker: Worker, request: Request, cuts: Sequence[int]) -> Tensor:
    """Logits of a prompt in the caches as they are."""
    chunks = [request.plan(worker, *span) for span in spans(len(request.ids), cuts)]
    return torch.cat([run_step(worker, [chunk])[0] for chunk in chunks])


def test_nothing_is_read_that_the_sequence_did_not_write(open_checkpoint: OpenCheckpoint) -> None:
    """With garbage wherever the sequence has not written yet, results stay the same."""
    checkpoint = open_checkpoint("nano", 2, wild=True)
    worker, ids = fixed_order(checkpoint).worker, random_ids(checkpoint, 150)
    cuts = (1, 2, 10, 77, 127, 128, 129, 130)
    clean = run_alone(worker, ids, cuts)
    worker.allocate(5, 3)
    fill(worker, 0x7E)
    request = Request(ids, slot=2, table=(4, 2))
    assert torch.equal(run_chunks(worker, request, cuts), clean)


def test_only_own_blocks_and_slot_are_written(open_checkpoint: OpenCheckpoint) -> None:
    checkpoint = open_checkpoint("nano", 2, wild=True)
    worker, ids = fixed_order(checkpoint).worker, random_ids(checkpoint, 150)
    worker.allocate(5, 3)
    fill(worker, 0x7E)
    run_chunks(worker, Request(ids, slot=2, table=(4, 2)), (10, 77))
    for cache in worker.caches:
        rings = [cache.window.records.view(4, -1)]
        if cache.pairs is not None:
            rings.append(cache.pairs.state.isnan().to(torch.uint8).view(4, -1) * 0x7E)
        for ring in rings:
            assert bool((ring[[0, 1, 3]] == 0x7E).all())
        pools = [cache.compressed.records.view(6, -1)] if cache.compressed is not None else []
        pools += [cache.index.blocks] if cache.index is not None else []
        for pool in pools:
            assert bool((pool[[0, 1, 3, 5]] == 0x7E).all())


def test_rows_of_the_dummy_block_and_slot_are_never_read(open_checkpoint: OpenCheckpoint) -> None:
    """A padding row, which writes to block 0 and slot 0, changes nothing beside it."""
    checkpoint = open_checkpoint("nano", 3, wild=True)
    worker, ids = fixed_order(checkpoint).worker, random_ids(checkpoint, 40)
    clean = run_alone(worker, ids, (20, 21))
    request, padding = Request.alone(ids), Request([5, 6], slot=0, table=(0,))
    rows = []
    worker.allocate(1, 1)
    for start, stop in spans(len(ids), (20, 21)):
        plans = [padding.plan(worker, 0, 2), request.plan(worker, start, stop)]
        rows.append(run_step(worker, plans)[1])
    assert torch.equal(torch.cat(rows), clean)


def test_neighbours_leave_a_sequence_alone(open_checkpoint: OpenCheckpoint) -> None:
    """Records are the same alone and beside others, and stay while only others run."""
    checkpoint = open_checkpoint("nano", 4, wild=True)
    worker = fixed_order(checkpoint).worker
    first, second = random_ids(checkpoint, 140, seed=1), random_ids(checkpoint, 135, seed=2)
    run_alone(worker, first)
    alone = cached_records(worker, Request.alone(first), 140)

    worker.allocate(4, 2)
    mine, other = Request(first, 2, (3, 1)), Request(second, 1, (2, 4))
    run_step(worker, [other.plan(worker, 0, 3), mine.plan(worker, 0, 139)])
    run_step(worker, [mine.plan(worker, 139, 140), other.plan(worker, 3, 130)])
    assert differing(cached_records(worker, mine, 140), alone) == []
    for position in range(130, 135):
        run_step(worker, [other.plan(worker, position, position + 1)])
    assert differing(cached_records(worker, mine, 140), alone) == []


def test_stale_bytes_of_an_earlier_sequence_do_not_matter(open_checkpoint: OpenCheckpoint) -> None:
    """A shorter sequence in the blocks and the slot of a longer one gives its own results."""
    checkpoint = open_checkpoint("nano", 0, wild=True)
    worker, ids = fixed_order(checkpoint).worker, random_ids(checkpoint, 60, seed=3)
    clean = run_alone(worker, ids, (33,))
    run_alone(worker, random_ids(checkpoint, 128, seed=4))
    assert torch.equal(run_chunks(worker, Request.alone(ids), (33,)), clean)
