"""The engine rounds where the reference rounds, and to the same formats.

Every part of every layer gets the reference's bf16 trunk. With the same order of every sum all
results are equal in every bit. With torch's orders a sum may fall on the other side of a rounding
boundary; that is rare, so most rows of a layer are still equal in every bit, while a missing or
misplaced rounding changes nearly all of them. The last part of the file plants such faults.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from deepinfer_neuron.cache import records
from deepinfer_neuron.checkpoint.formats import decode_e4m3, encode_e2m1
from deepinfer_neuron.model import attention, blocks
from deepinfer_neuron.ops import hyper, quant
from deepinfer_neuron.ops.arithmetic import Arithmetic
from deepinfer_neuron.ops.norm import inverse_rms
from tests.conftest import OpenCheckpoint
from tests.support.engine_runs import Sides, fixed_order, free_order, random_ids
from tests.support.fed_layers import Given, compare, feed, reference_layers, selection_changes
from tests.support.prompt_lengths import Case, cases

NANO, TINY = cases("nano", longest=300), cases("tiny", longest=131)
LONG_NANO, LONG_TINY = cases("nano", longest=700, extra=4), cases("tiny", longest=600)
FREE_CASES = NANO + TINY[1::3]
LONG_FREE_CASES = TINY[::3] + LONG_NANO[len(NANO) :] + LONG_TINY[-2:]
FIXED_CASES = cases("nano", longest=70) + cases("tiny", longest=9)
LONG_FIXED_CASES = NANO[17:] + TINY[3:7]
ENOUGH_ROWS = 15
"""From how many rows on the majority of them counts."""


@dataclass(frozen=True)
class Run:
    """The reference's record of a prompt, and an engine to run it."""

    case: Case
    sides: Sides
    ids: list[int]
    given: list[Given]


def run_case(sides: Sides, case: Case) -> Run:
    """The reference's side of a case."""
    ids = random_ids(sides.network.checkpoint, case.length)
    given, _ = reference_layers(sides.network, ids)
    return Run(case, sides, ids, given)


def check_every_bit(run: Run) -> None:
    """Trunks, mixes and selections of every layer are equal."""
    fed = feed(run.sides, run.ids, run.given, run.case.cuts)
    for layer, (mine, theirs) in enumerate(zip(fed, run.given, strict=True)):
        found = compare(mine, theirs)
        assert bool(found.same_selection.all()), f"layer {layer}"
        assert bool(found.equal.all()), f"layer {layer}"
        assert found.mix == 0, f"layer {layer}"


def check_most_rows(run: Run) -> None:
    """The median row of every layer is equal, the others are as close as one code may be.

    A code of a query's latent that falls to its other side moves a handful of codes of the index
    query and with them its scores, by up to a few hundredths of the largest one.
    """
    fed = feed(run.sides, run.ids, run.given, run.case.cuts)
    for layer, (mine, theirs) in enumerate(zip(fed, run.given, strict=True)):
        found = compare(mine, theirs)
        if run.case.length >= ENOUGH_ROWS:
            assert float(found.equal.float().mean()) > 0.5, f"layer {layer}"
        assert float(found.error[found.same_selection].max()) < 0.2, f"layer {layer}"
        assert found.mix < 1e-5, f"layer {layer}"
        changes = list(selection_changes(mine, theirs))
        assert len(changes) <= 0.02 * run.case.length, f"layer {layer}"
        assert max(changes, default=0.0) < 0.1, f"layer {layer}"


@pytest.mark.parametrize("case", FIXED_CASES, ids=str)
def test_same_order_gives_the_same_bits(open_checkpoint: OpenCheckpoint, case: Case) -> None:
    checkpoint = open_checkpoint(case.preset, case.seed, case.wild)
    check_every_bit(run_case(fixed_order(checkpoint), case))


@pytest.mark.parametrize("case", FREE_CASES, ids=str)
def test_any_order_gives_the_same_median_row(open_checkpoint: OpenCheckpoint, case: Case) -> None:
    checkpoint = open_checkpoint(case.preset, case.seed, case.wild)
    check_most_rows(run_case(free_order(checkpoint), case))


@pytest.mark.slow
@pytest.mark.parametrize("case", LONG_FIXED_CASES, ids=str)
def test_long_prompts_in_the_same_order(open_checkpoint: OpenCheckpoint, case: Case) -> None:
    checkpoint = open_checkpoint(case.preset, case.seed, case.wild)
    check_every_bit(run_case(fixed_order(checkpoint), case))


@pytest.mark.slow
@pytest.mark.parametrize("case", LONG_FREE_CASES, ids=str)
def test_long_prompts_in_any_order(open_checkpoint: OpenCheckpoint, case: Case) -> None:
    checkpoint = open_checkpoint(case.preset, case.seed, case.wild)
    check_most_rows(run_case(free_order(checkpoint), case))


# Faults. Each function plants one into the engine and says which in its name.

Fault = Callable[[pytest.MonkeyPatch], None]


def routing_weight_enters_after_quantization(patch: pytest.MonkeyPatch) -> None:
    original = blocks.swiglu

    def faulty(gate: Tensor, up: Tensor, share: Tensor, limit: float, a: Arithmetic) -> Tensor:
        return a.round(original(gate, up, torch.ones_like(share), limit, a).float() * share)

    patch.setattr(blocks, "swiglu", faulty)


def cache_codes_come_from_a_division(patch: pytest.MonkeyPatch) -> None:
    original = records.q4_cache_codes

    def faulty(x: Tensor) -> tuple[Tensor, Tensor]:
        _, scale = original(x)
        groups = x.float().unflatten(-1, (-1, 16)) / decode_e4m3(scale)[..., None]
        return encode_e2m1(groups.flatten(-2)), scale

    patch.setattr(records, "q4_cache_codes", faulty)


def epsilon_is_a_millionth(patch: pytest.MonkeyPatch) -> None:
    original = attention.rms_norm
    for module in (attention, blocks):
        patch.setattr(module, "rms_norm", lambda x, weight, eps, a: original(x, weight, 1e-6, a))


def norm_rounds_before_its_weight(patch: pytest.MonkeyPatch) -> None:
    def faulty(x: Tensor, weight: Tensor, eps: float, a: Arithmetic) -> Tensor:
        wide = x.float()
        return a.round(a.round(wide * inverse_rms(wide, eps, a)[..., None]).float() * weight)

    for module in (attention, blocks):
        patch.setattr(module, "rms_norm", faulty)


def scores_are_rounded_only_once(patch: pytest.MonkeyPatch) -> None:
    def faulty(query: Tensor, keys: Tensor, weight: Tensor, a: Arithmetic) -> Tensor:
        dot = torch.einsum("nhd,md->nhm", query.float(), keys.float()).relu()
        return a.round((dot * weight.float()[..., None]).sum(1)).float()

    patch.setattr(attention, "index_scores", faulty)


def streams_grow_without_fused_operations(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(hyper, "_fused", lambda a, b, c: a.float() * b.float() + c)


def exact_powers_of_two_are_bumped(patch: pytest.MonkeyPatch) -> None:
    original = quant.ue8m0_scale
    patch.setattr(quant, "ue8m0_scale", lambda amax, top: original(amax * (1 + 2.0**-20), top))


def ties_move_away_from_zero(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(quant, "encode_e2m1", lambda x: encode_e2m1(x * (1 + 2.0**-20)))


def open_pairs_are_rounded(patch: pytest.MonkeyPatch) -> None:
    original = attention.pool_pairs
    patch.setattr(
        attention, "pool_pairs", lambda x, y, a: original(a.round(x).float(), a.round(y).float(), a)
    )


def expert_outputs_are_summed_in_bf16(patch: pytest.MonkeyPatch) -> None:
    def faulty(shared: Tensor, routed: Tensor, a: Arithmetic) -> Tensor:
        return shared + a.round(routed.float().sum(1))

    patch.setattr(blocks, "combine", faulty)


def router_reads_the_quantized_input(patch: pytest.MonkeyPatch) -> None:
    original = blocks.route
    patch.setattr(blocks, "route", lambda y, *rest: original(quant.q8(y, rest[-1]), *rest))


FAULTS: tuple[Fault, ...] = (
    routing_weight_enters_after_quantization,
    cache_codes_come_from_a_division,
    epsilon_is_a_millionth,
    norm_rounds_before_its_weight,
    scores_are_rounded_only_once,
    streams_grow_without_fused_operations,
    exact_powers_of_two_are_bumped,
    ties_move_away_from_zero,
    open_pairs_are_rounded,
    expert_outputs_are_summed_in_bf16,
    router_reads_the_quantized_input,
)
COARSE: tuple[Fault, ...] = (
    routing_weight_enters_after_quantization,
    cache_codes_come_from_a_division,
    norm_rounds_before_its_weight,
    exact_powers_of_two_are_bumped,
    ties_move_away_from_zero,
    open_pairs_are_rounded,
    expert_outputs_are_summed_in_bf16,
    router_reads_the_quantized_input,
)

SOUND = Case("nano", seed=0, wild=True, length=100, cuts=(37, 71))


@pytest.fixture(scope="module")
def sound(open_checkpoint: OpenCheckpoint) -> Run:
    """A prompt long enough for every filter, cut in the middle of a pair; fixed order."""
    run = run_case(fixed_order(open_checkpoint(SOUND.preset, SOUND.seed, SOUND.wild)), SOUND)
    check_every_bit(run)
    return run


@pytest.fixture(scope="module")
def sound_in_any_order(open_checkpoint: OpenCheckpoint) -> Run:
    """The same prompt in torch's order."""
    run = run_case(free_order(open_checkpoint(SOUND.preset, SOUND.seed, SOUND.wild)), SOUND)
    check_most_rows(run)
    return run


@pytest.mark.parametrize("plant", FAULTS, ids=lambda fault: fault.__name__)
def test_a_fault_changes_bits(sound: Run, monkeypatch: pytest.MonkeyPatch, plant: Fault) -> None:
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        check_every_bit(sound)


@pytest.mark.parametrize("plant", COARSE, ids=lambda fault: fault.__name__)
def test_a_coarse_fault_changes_the_median_row(
    sound_in_any_order: Run, monkeypatch: pytest.MonkeyPatch, plant: Fault
) -> None:
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        check_most_rows(sound_in_any_order)
