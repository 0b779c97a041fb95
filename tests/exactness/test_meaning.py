"""Without any rounding point the engine computes what the reference computes.

Both sides then work in fp32 and differ only in the order of their sums, which is worth about 1e-7
of a result. A wrong formula is worth more, so a bound of 1e-5 tells one from the other. The last
part of the file proves that: each fault that it plants into the engine breaks the bound.

Two index scores may be closer to each other than that noise. Where the limit of a selection falls
between them, either entry is right; such a row is recognised by the reference's scores.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from deepinfer_neuron.model import attention, blocks
from deepinfer_neuron.model.attention import Turns
from deepinfer_neuron.model.step import EntryPlan, StepTensors
from deepinfer_neuron.ops import hyper
from deepinfer_neuron.ops.arithmetic import Arithmetic
from deepinfer_neuron.ops.hyper import Mix
from deepinfer_neuron.runner import pack
from deepinfer_neuron.runner.worker import Worker
from tests.conftest import OpenCheckpoint
from tests.support.engine_runs import Sides, random_ids, run_alone, unrounded
from tests.support.fed_layers import Given, compare, feed, reference_layers, selection_changes
from tests.support.prompt_lengths import Case, cases

TOLERANCE = 1e-5
NANO, TINY = cases("nano", longest=300), cases("tiny", longest=131)
LONG_NANO, LONG_TINY = cases("nano", longest=700, extra=8), cases("tiny", longest=600, extra=2)
CASES = NANO + TINY[::3]
LONG_CASES = TINY[1::3] + LONG_NANO[len(NANO) :] + LONG_TINY[len(TINY) :]


@dataclass(frozen=True)
class Run:
    """The reference's record of a prompt, and an engine to run it."""

    case: Case
    sides: Sides
    ids: list[int]
    given: list[Given]
    logits: Tensor


def run_case(open_checkpoint: OpenCheckpoint, case: Case) -> Run:
    """The reference's side of a case."""
    checkpoint = open_checkpoint(case.preset, case.seed, case.wild)
    sides, ids = unrounded(checkpoint), random_ids(checkpoint, case.length)
    return Run(case, sides, ids, *reference_layers(sides.network, ids))


@pytest.fixture(scope="module", params=CASES, ids=str)
def run(request: pytest.FixtureRequest, open_checkpoint: OpenCheckpoint) -> Run:
    """One of the quick cases."""
    return run_case(open_checkpoint, request.param)


def check_layers(run: Run) -> None:
    """Every part of every layer agrees when it is fed with the reference's values."""
    fed = feed(run.sides, run.ids, run.given, run.case.cuts)
    for layer, (mine, theirs) in enumerate(zip(fed, run.given, strict=True)):
        found = compare(mine, theirs)
        assert float(found.error[found.same_selection].max()) < TOLERANCE, f"layer {layer}"
        assert found.mix < TOLERANCE, f"layer {layer}"
        assert max(selection_changes(mine, theirs), default=0.0) < TOLERANCE, f"layer {layer}"
        candidates = theirs.record.shared.candidates
        if candidates is not None:
            assert_same_blocks(run, mine.kept, candidates)


def assert_same_blocks(run: Run, kept: list[Tensor | None], candidates: Tensor) -> None:
    """The engine's candidate blocks are those whose entries the reference keeps."""
    size = run.sides.network.config.candidate_block_size
    for row, blocks_kept in enumerate(kept):
        visible = row + 1
        expected = candidates[row, :visible].nonzero().flatten().div(size, rounding_mode="floor")
        everything = torch.arange(math.ceil(visible / size))
        found = everything if blocks_kept is None else blocks_kept
        assert torch.equal(found, expected.unique()), f"row {row}"


def check_logits(run: Run) -> None:
    """Logits and greedy tokens agree although errors travel through all layers.

    Rows from the first one on whose selection noise may change are not judged if they differ.
    """
    logits = run_alone(run.sides.worker, run.ids, run.case.cuts)
    error = (logits - run.logits).norm(dim=1) / run.logits.norm(dim=1)
    wrong = (error >= TOLERANCE) | (logits.argmax(1) != run.logits.argmax(1))
    first_wrong = wrong.nonzero().flatten().tolist()[:1]
    assert not first_wrong or first_wrong[0] >= first_close_call(run)


def first_close_call(run: Run) -> int:
    """The first row in which the last selected and the first rejected score nearly agree."""
    limit, rows = run.sides.network.config.index_topk, len(run.ids)
    for layer in run.given:
        scores = layer.record.shared.scores
        if scores is None or scores.shape[1] <= limit:
            continue
        best = scores.sort(dim=1, descending=True).values
        gap = (best[:, limit - 1] - best[:, limit]) / best[:, 0].abs()
        close = ((gap > 0) & (gap < TOLERANCE)).nonzero().flatten().tolist()
        rows = min([rows, *close])
    return rows


def test_fed_layers_agree(run: Run) -> None:
    check_layers(run)


def test_logits_agree(run: Run) -> None:
    check_logits(run)


@pytest.mark.slow
@pytest.mark.parametrize("case", LONG_CASES, ids=str)
def test_long_prompts_agree(open_checkpoint: OpenCheckpoint, case: Case) -> None:
    long = run_case(open_checkpoint, case)
    check_layers(long)
    check_logits(long)


# Faults. Each function plants one into the engine and says which in its name.

Fault = Callable[[pytest.MonkeyPatch, Worker], None]


def comb_is_transposed(patch: pytest.MonkeyPatch, worker: Worker) -> None:
    original = blocks.mix_coefficients

    def faulty(*args: object, **kwargs: object) -> Mix:
        mix = original(*args, **kwargs)
        return mix._replace(comb=mix.comb.mT)

    patch.setattr(blocks, "mix_coefficients", faulty)


def sinkhorn_stops_one_round_early(patch: pytest.MonkeyPatch, worker: Worker) -> None:
    original = hyper.sinkhorn
    patch.setattr(hyper, "sinkhorn", lambda x, eps, rounds, a: original(x, eps, rounds - 1, a))


def site_collapses_with_its_own_mix(patch: pytest.MonkeyPatch, worker: Worker) -> None:
    original = blocks.Site.forward
    patch.setattr(
        blocks.Site,
        "forward",
        lambda self, trunk, pre, block: original(self, trunk, self.mix(trunk).pre, block),
    )


def entry_sits_at_its_last_token(patch: pytest.MonkeyPatch, worker: Worker) -> None:
    original = pack._entry_plan

    def faulty(rows: pack._Rows, ratio: int, geometry: pack.StepGeometry) -> EntryPlan:
        plan = original(rows, ratio, geometry)
        return dataclasses.replace(plan, positions=plan.positions + ratio - 1)

    patch.setattr(pack, "_entry_plan", faulty)


def next_token_is_visible(patch: pytest.MonkeyPatch, worker: Worker) -> None:
    original = attention.Selector.forward

    def faulty(self, x, latent, turns, step: StepTensors, published) -> None:
        ahead = dataclasses.replace(step, positions=step.positions + 1)
        original(self, x, latent, turns, ahead, published)

    patch.setattr(attention.Selector, "forward", faulty)


def output_is_not_rotated_back(patch: pytest.MonkeyPatch, worker: Worker) -> None:
    original = attention.rope

    def faulty(x: Tensor, turns: Tensor, a: Arithmetic, *, inverse: bool = False) -> Tensor:
        return x if inverse else original(x, turns, a)

    patch.setattr(attention, "rope", faulty)


def window_only_layers_use_yarn(patch: pytest.MonkeyPatch, worker: Worker) -> None:
    original = worker.network.turns

    def faulty(step: StepTensors) -> Turns:
        turns = original(step)
        return dataclasses.replace(turns, window=turns.compressed)

    patch.setattr(worker.network, "turns", faulty)


def window_is_one_key_wider(patch: pytest.MonkeyPatch, worker: Worker) -> None:
    wider = dataclasses.replace(worker.geometry, window=worker.geometry.window + 1)
    patch.setattr(worker, "geometry", wider)


def ring_is_two_keys_short(patch: pytest.MonkeyPatch, worker: Worker) -> None:
    shorter = dataclasses.replace(worker.geometry, window_ring=worker.geometry.window - 2)
    patch.setattr(worker, "geometry", shorter)


def first_token_of_a_pair_is_lost_at_a_cut(patch: pytest.MonkeyPatch, worker: Worker) -> None:
    original = pack._entry_plan

    def faulty(rows: pack._Rows, ratio: int, geometry: pack.StepGeometry) -> EntryPlan:
        plan = original(rows, ratio, geometry)
        return dataclasses.replace(plan, ring_read=plan.ring_read * 0)

    patch.setattr(pack, "_entry_plan", faulty)


def ngrams_forget_the_chunk_before(patch: pytest.MonkeyPatch, worker: Worker) -> None:
    original = worker.engram_rows
    patch.setattr(
        worker,
        "engram_rows",
        lambda histories: original([(ids[start:], 0) for ids, start in histories]),
    )


def score_and_value_are_exchanged(patch: pytest.MonkeyPatch, worker: Worker) -> None:
    original = attention.pool_pairs
    patch.setattr(attention, "pool_pairs", lambda a, b, c: original(a.flip(1), b.flip(1), c))


def index_keys_come_from_the_rotated_latent(patch: pytest.MonkeyPatch, worker: Worker) -> None:
    original = attention.KeySource.forward

    def faulty(self: attention.KeySource, x: Tensor, plan: EntryPlan, turns: Tensor, cache):
        return attention.rope(original(self, x, plan, turns, cache), turns, self.arithmetic)

    patch.setattr(attention.KeySource, "forward", faulty)


def head_weight_enters_before_the_relu(patch: pytest.MonkeyPatch, worker: Worker) -> None:
    def faulty(query: Tensor, keys: Tensor, weight: Tensor, arithmetic: Arithmetic) -> Tensor:
        return (torch.einsum("nhd,md->nhm", query, keys) * weight[..., None]).relu().sum(1)

    patch.setattr(attention, "index_scores", faulty)


def last_block_is_not_kept(patch: pytest.MonkeyPatch, worker: Worker) -> None:
    original = attention.candidate_blocks
    patch.setattr(
        attention,
        "candidate_blocks",
        lambda scores, visible, size, limit: original(scores, visible * 0, size, limit),
    )


def candidates_do_not_bind(patch: pytest.MonkeyPatch, worker: Worker) -> None:
    original = attention.candidate_mask
    patch.setattr(attention, "candidate_mask", lambda *args: torch.ones_like(original(*args)))


def sink_is_scaled_like_a_logit(patch: pytest.MonkeyPatch, worker: Worker) -> None:
    original = attention.sink_attention

    def faulty(q, near, near_index, far, far_index, sink, scale, a):
        return original(q, near, near_index, far, far_index, sink * scale, scale, a)

    patch.setattr(attention, "sink_attention", faulty)


def groups_take_every_other_head(patch: pytest.MonkeyPatch, worker: Worker) -> None:
    original = attention.Attention.project

    def faulty(self: attention.Attention, out: Tensor, turns: Tensor) -> Tensor:
        return original(self, out.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2), turns)

    patch.setattr(attention.Attention, "project", faulty)


def memory_value_comes_first(patch: pytest.MonkeyPatch, worker: Worker) -> None:
    original = blocks.engram_update
    patch.setattr(
        blocks, "engram_update", lambda trunk, kv, *rest: original(trunk, kv.roll(1, 1), *rest)
    )


def routing_ignores_the_bias(patch: pytest.MonkeyPatch, worker: Worker) -> None:
    original = blocks.route
    patch.setattr(blocks, "route", lambda y, w, bias, *rest: original(y, w, bias * 0, *rest))


def routing_weights_are_not_scaled(patch: pytest.MonkeyPatch, worker: Worker) -> None:
    original = blocks.route
    patch.setattr(blocks, "route", lambda *args: original(*args[:4], 1.0, args[5]))


FAULTS: tuple[Fault, ...] = (
    comb_is_transposed,
    sinkhorn_stops_one_round_early,
    site_collapses_with_its_own_mix,
    entry_sits_at_its_last_token,
    next_token_is_visible,
    output_is_not_rotated_back,
    window_only_layers_use_yarn,
    window_is_one_key_wider,
    ring_is_two_keys_short,
    first_token_of_a_pair_is_lost_at_a_cut,
    ngrams_forget_the_chunk_before,
    score_and_value_are_exchanged,
    index_keys_come_from_the_rotated_latent,
    head_weight_enters_before_the_relu,
    last_block_is_not_kept,
    candidates_do_not_bind,
    sink_is_scaled_like_a_logit,
    groups_take_every_other_head,
    memory_value_comes_first,
    routing_ignores_the_bias,
    routing_weights_are_not_scaled,
)


@pytest.fixture(scope="module")
def sound(open_checkpoint: OpenCheckpoint) -> Run:
    """A prompt long enough for every filter, cut in the middle of a pair."""
    run = run_case(open_checkpoint, Case("nano", seed=0, wild=True, length=100, cuts=(37, 71)))
    check_layers(run)
    return run


@pytest.mark.parametrize("plant", FAULTS, ids=lambda fault: fault.__name__)
def test_a_fault_is_seen(sound: Run, monkeypatch: pytest.MonkeyPatch, plant: Fault) -> None:
    plant(monkeypatch, sound.sides.worker)
    with pytest.raises(AssertionError):
        check_layers(sound)
