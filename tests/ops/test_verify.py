"""Verification of drafts against loops, exact integers and a worked example."""

from __future__ import annotations

import math
import random
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch import Tensor

from deepinfer_neuron.ops import verify
from deepinfer_neuron.ops.arithmetic import FixedOrder, FreeOrder
from deepinfer_neuron.ops.philox import seed_bits
from deepinfer_neuron.ops.sample import Distribution, Transform, distribution
from tests.sampling import plain

ORDER = FixedOrder()
STEP = 10_000_019


def ints(values: list[int], dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(values, dtype=dtype)


def bools(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.bool)


def first_rows(lengths: list[int]) -> list[int]:
    return [sum(lengths[:i]) for i in range(len(lengths))]


@pytest.mark.parametrize("lengths", [[], [1], [6], [1, 1, 1], [3, 1, 6, 2], [0, 2, 0, 0, 3, 0]])
def test_rows_of_requests(lengths: list[int]) -> None:
    rows = verify.verification_rows(ints(first_rows(lengths)), ints(lengths), sum(lengths))
    expected = [(i, j, j < n - 1) for i, n in enumerate(lengths) for j in range(n)]
    got = zip(rows.requests.tolist(), rows.steps.tolist(), rows.verifies.tolist(), strict=True)
    assert list(got) == expected
    assert rows.requests.dtype == rows.steps.dtype == torch.int32


def test_row_positions_wrap() -> None:
    at = verify.row_positions(ints([200, 2**31 - 5]), ints([0, 0, 1, 1]), ints([0, 3, 0, 7]))
    wrapped = (2**31 - 5 + 7 * STEP + 2**31) % 2**32 - 2**31
    assert at.tolist() == [200, 200 + 3 * STEP, 2**31 - 5, wrapped]
    assert at.dtype == torch.int32


def random_laws(rows: int, width: int, seed: int) -> tuple[Distribution, Tensor]:
    """Target and draft distributions, filtered and not, some of them equal."""
    logits, other = plain.logits(rows, width, seed), plain.logits(rows, width, seed + 1)
    other[::3] = logits[::3]
    transform = Transform(
        [(0.5, 1.0, 1e-5)[r % 3] for r in range(rows)],
        [0.0] * rows,
        [(1.0, 0.8)[r % 2] for r in range(rows)],
        [(-1, 5, width)[r % 3] for r in range(rows)],
    )
    target = distribution(logits, transform, ORDER)
    return target, distribution(other, transform, ORDER).logprobs


def fp32_exp(x: float) -> float:
    """Exponential rounded once to fp32, 0 where results stop being normal numbers."""
    return float(np.float32(math.exp(x))) if x >= -87.0 else 0.0


def plain_decision(
    lp: list[float], p: list[float], d: list[float], draft: int, seed: int, position: int
) -> tuple[bool, int, float]:
    """One row with Python integers: accepted, candidate, acceptance probability."""
    accepted = False
    if draft >= 0 and lp[draft] > -math.inf:
        ratio = min(float(np.float32(lp[draft]) - np.float32(d[draft])), 0.0)
        limit = math.floor(Fraction(fp32_exp(ratio)) * 2**33)
        accepted = plain.words(seed, position, 2)[0] * 2 + 1 < limit
    penalty = np.float32(5e-5)
    residual = [
        max(float(np.float32(a) - np.float32(fp32_exp(float(np.float32(b) - penalty)))), 0.0)
        for a, b in zip(p, d, strict=True)
    ]
    total = sum(math.floor(Fraction(r) * 2**31) for r in residual)
    probability = max(float(np.float32(1) - np.float32(total) * np.float32(2.0**-31)), 0.0)
    if accepted:
        return True, draft, probability
    drawn = plain.draw(residual, seed, position, 1)
    return False, lp.index(max(lp)) if drawn is None else drawn, probability


@pytest.mark.parametrize(("rows", "width"), [(24, 9), (12, 130), (1, 64), (0, 16)])
def test_decisions_are_those_of_exact_integers(rows: int, width: int) -> None:
    target, draft = random_laws(rows, width, seed=width)
    source = random.Random(width)
    drafts = [source.choice([-1, *range(width), *range(width)]) for _ in range(rows)]
    for r in range(1, rows, 2):  # drafts that were really drawn
        drafts[r] = int(draft[r].argmax())
    verifies = [source.random() < 0.8 for _ in range(rows)]
    seeds = [source.getrandbits(64) for _ in range(rows)]
    positions = [source.randrange(2**31) for _ in range(rows)]
    got = verify.accept_drafts(
        target, draft, ints(drafts), bools(verifies), seed_bits(seeds), ints(positions), ORDER
    )
    for r in range(rows):
        d = draft[r].tolist()
        assert got.draft_logprobs[r].item() == (d[drafts[r]] if drafts[r] >= 0 else -math.inf)
        p = target.probabilities[r].tolist()
        accepted, token, probability = plain_decision(
            target.logprobs[r].tolist(), p, d, drafts[r], seeds[r], positions[r]
        )
        if not verifies[r]:
            accepted, probability = True, 1.0
            token = plain.draw(p, seeds[r], positions[r]) or 0
        assert bool(got.accept[r]) == accepted
        assert int(got.candidates[r]) == token
        assert got.accept_probs[r].item() == probability


def law(probabilities: list[float], rows: int) -> Distribution:
    p = torch.tensor(probabilities).expand(rows, -1).contiguous()
    return Distribution(p.log(), p)


@pytest.mark.parametrize("draft", [0, 2, -1])
def test_an_empty_residual_gives_the_first_maximum(draft: int) -> None:
    target = law([0.0, 0.5, 0.5, 0.0], 50)
    above = torch.full((50, 4), 0.1)  # more than the target everywhere
    got = verify.accept_drafts(
        target,
        above,
        torch.full((50,), draft),
        torch.ones(50, dtype=torch.bool),
        torch.arange(50),
        torch.arange(50),
        ORDER,
    )
    assert got.accept_probs.tolist() == [1.0] * 50
    assert got.candidates.tolist() == [2 if a else 1 for a in got.accept.tolist()]
    if draft != 2:
        assert not bool(got.accept.any())


def test_equal_distributions_always_accept() -> None:
    """The acceptance test carries no penalty, the residual does."""
    rows = 2000
    target = law([0.1, 0.2, 0.3, 0.4], rows)
    got = verify.accept_drafts(
        target,
        target.logprobs,
        torch.arange(rows) % 4,
        torch.ones(rows, dtype=torch.bool),
        torch.arange(rows),
        torch.arange(rows) * 3,
        FreeOrder(),
    )
    assert bool(got.accept.all())
    torch.testing.assert_close(got.accept_probs, torch.full((rows,), math.exp(-5e-5)))


def test_acceptance_at_a_known_random_word() -> None:
    """Seed 42 at position 10 draws 0xa642fd96: accepted from 0.64945969 on."""
    for ratio, expected in ((0.649459, False), (0.649461, True)):
        target = law([0.5 * ratio, 1 - 0.5 * ratio], 1)
        got = verify.accept_drafts(
            target,
            torch.tensor([[0.5, 0.5]]).log(),
            ints([0]),
            bools([1]),
            seed_bits([42]),
            ints([10]),
            ORDER,
        )
        assert bool(got.accept) is expected


@pytest.mark.parametrize("neighbours", [1, 7])
def test_a_row_does_not_depend_on_its_neighbours(neighbours: int) -> None:
    target, draft = random_laws(8, 100, seed=3)
    arguments = (
        draft,
        torch.arange(8),
        bools([1, 1, 0, 1, 1, 1, 0, 1]),
        torch.arange(8) + 5,
        torch.arange(8) * 11,
    )
    whole = verify.accept_drafts(target, *arguments, FreeOrder())
    for row in range(0, 8 - neighbours):
        cut = slice(row, row + neighbours)
        part = Distribution(target.logprobs[cut], target.probabilities[cut])
        got = verify.accept_drafts(part, *(a[cut] for a in arguments), FreeOrder())
        for field in ("accept", "candidates", "accept_probs", "draft_logprobs"):
            assert torch.equal(getattr(got, field), getattr(whole, field)[cut])


def test_acceptance_probability_is_the_overlap() -> None:
    target, draft = random_laws(30, 50, seed=9)
    everywhere = torch.ones(30, dtype=torch.bool)
    rows = torch.arange(30)
    got = verify.accept_drafts(target, draft, rows, everywhere, rows, rows, ORDER)
    overlap = torch.minimum(target.probabilities.double(), draft.double().exp()).sum(-1)
    assert float((got.accept_probs - overlap).abs().max()) <= 5.1e-5 + 50 / 2**31


def test_greedy_rows() -> None:
    best = torch.tensor([3, 3, 3, 3])
    got = verify.accept_greedy(best, ints([3, 2, -1, 9]), bools([1, 1, 1, 0]))
    assert got.accept.tolist() == [True, False, False, True]
    assert got.candidates.tolist() == [3, 3, 3, 3]
    one = float(np.float32(math.exp(-5e-5)))
    assert got.accept_probs.tolist() == [one, 0.0, 0.0, 1.0]
    assert got.draft_logprobs.tolist() == [0.0, 0.0, -math.inf, 0.0]


def test_greedy_is_the_limit_of_the_general_rule() -> None:
    logits, other = plain.logits(40, 30, seed=4), plain.logits(40, 30, seed=5)
    other[::2] = logits[::2]
    cold = Transform([1e-5] * 40, [0.0] * 40, [1.0] * 40, [-1] * 40)
    target, draft = (distribution(x, cold, ORDER) for x in (logits, other))
    drafts, rows = other.argmax(-1), torch.arange(40)
    verifies = rows % 5 != 4
    general = verify.accept_drafts(target, draft.logprobs, drafts, verifies, rows, rows, ORDER)
    greedy = verify.accept_greedy(logits.argmax(-1), drafts, verifies)
    assert torch.equal(general.accept, greedy.accept)
    assert torch.equal(general.candidates, greedy.candidates)
    torch.testing.assert_close(general.accept_probs, greedy.accept_probs, atol=1e-8, rtol=0)


def plain_result(
    accept: list[int],
    candidates: list[int],
    drafts: list[int],
    lengths: list[int],
    golden: list[int] | None,
) -> list[tuple[int, bool, bool]]:
    result, row = [], 0
    for length in lengths:
        alive = True
        for step in range(length):
            token, ok = candidates[row], bool(accept[row])
            if golden is not None and golden[row] != -1:
                token, ok = golden[row], golden[row] == drafts[row]
            goes_on = step < length - 1 and ok
            result.append((token, alive and goes_on, alive and not goes_on))
            alive = alive and goes_on
            row += 1
    return result


@pytest.mark.parametrize("forced", [False, True])
@pytest.mark.parametrize("lengths", [[], [1], [4], [1, 5, 1, 6, 3, 3], [2] * 100])
def test_rows_are_emitted_up_to_the_first_rejection(lengths: list[int], forced: bool) -> None:
    total, source = sum(lengths), random.Random(1)
    rows = verify.verification_rows(ints(first_rows(lengths)), ints(lengths), total)
    for chance in (0.0, 0.6, 1.0):
        accept = [source.random() < chance for _ in range(total)]
        candidates = [source.randrange(5) for _ in range(total)]
        drafts = [source.randrange(5) for _ in range(total)]
        golden = [source.choice([-1, 1, 2, 3]) for _ in range(total)] if forced else None
        got = verify.accept_result(
            bools(accept),
            ints(candidates),
            ints(drafts),
            rows.verifies,
            ints(first_rows(lengths)),
            rows.requests,
            ints(golden) if golden is not None else None,
        )
        expected = plain_result(accept, candidates, drafts, lengths, golden)
        assert list(
            zip(*(x.tolist() for x in (got.tokens, got.accept, got.final)), strict=True)
        ) == (expected)
        counts = verify.accepted_counts(got.accept, ints(first_rows(lengths)), ints(lengths))
        starts = first_rows(lengths)
        finals = [row for row, (_, _, final) in enumerate(expected) if final]
        assert [s + c for s, c in zip(starts, counts.tolist(), strict=True)] == finals


def test_worked_example() -> None:
    """Two requests with five drafts: one stops at the third row, one takes all."""
    lengths, starts = ints([6, 6]), ints([0, 6])
    rows = verify.verification_rows(starts, lengths, 12)
    assert rows.verifies.tolist() == [True] * 5 + [False] + [True] * 5 + [False]
    positions = verify.row_positions(ints([200, 41]), rows.requests, rows.steps)
    assert positions.tolist() == [s + j * STEP for s in (200, 41) for j in range(6)]
    drafts = ints([11, 12, 13, 14, 15, 0, 21, 22, 23, 24, 25, 0])
    best = torch.tensor([11, 12, 99, 14, 15, 98, 21, 22, 23, 24, 25, 97])
    decided = verify.accept_greedy(best, drafts, rows.verifies)
    got = verify.accept_result(
        decided.accept, decided.candidates, drafts, rows.verifies, starts, rows.requests
    )
    assert got.accept.int().tolist() == [1, 1, 0, 0, 0, 0, 1, 1, 1, 1, 1, 0]
    assert got.final.nonzero().flatten().tolist() == [2, 11]
    counts = verify.accepted_counts(got.accept, starts, lengths)
    assert counts.tolist() == [2, 5]
    assert verify.step_counts(got.accept, rows.steps, 5).tolist() == [2, 2, 1, 1, 1]
    assert verify.step_counts(rows.verifies, rows.steps, 5, fold=True).tolist() == [2] * 5
    assert got.tokens[verify.final_rows(starts, counts, got.tokens.shape[0])].tolist() == [99, 97]
    kept = verify.accepted_values(got.tokens, got.accept, -1)
    assert kept.tolist() == [11, 12, -1, -1, -1, -1, 21, 22, 23, 24, 25, -1]


def test_counts_per_step_fold_or_drop() -> None:
    mark, steps = bools([1, 1, 0, 1, 1]), ints([0, 1, 1, 2, 4])
    assert verify.step_counts(mark, steps, 2).tolist() == [1, 1]
    assert verify.step_counts(mark, steps, 2, fold=True).tolist() == [1, 3]


@pytest.mark.parametrize(
    ("stops", "expected"),
    [([[12, -1], [7, 7]], [True, False]), ([[14, -1], [25, 97]], [False, True])],
)
def test_stop_tokens_count_up_to_the_final_row(
    stops: list[list[int]], expected: list[bool]
) -> None:
    """14 is behind the final row of the first request, 97 is the final token of the second."""
    accepted = verify.Accepted(
        ints([11, 12, 99, 14, -1, 21, 97]),
        bools([1, 1, 0, 0, 0, 1, 0]),
        bools([0, 0, 1, 0, 0, 0, 1]),
    )
    requests = ints([0, 0, 0, 0, 0, 1, 1])
    got = verify.emitted_stop(accepted, ints(stops), requests, ints([0, 5]), ints([5, 2]))
    assert got.tolist() == expected


def test_values_of_several_columns() -> None:
    values = torch.arange(12.0).view(4, 3)
    got = verify.accepted_values(values, bools([1, 0, 0, 1]), 0)
    assert got.tolist() == [[0, 1, 2], [0, 0, 0], [0, 0, 0], [9, 10, 11]]
    assert values[verify.final_rows(ints([0, 3]), ints([1, 0]), 4)].tolist() == [
        [3, 4, 5],
        [9, 10, 11],
    ]


def test_confidence_error_counts_judged_drafts() -> None:
    got = verify.confidence_error(
        torch.tensor([0.5, 1.0, 0.25]), torch.tensor([0.75, 0.0, 0.0]), bools([1, 0, 1]), ORDER
    )
    assert got.item() == 0.5
