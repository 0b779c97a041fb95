"""Factories of the sampler against exact integers, one row at a time."""

from __future__ import annotations

import math
import random

import pytest
import torch
from torch import Tensor

from deepinfer_neuron.compat.tilelang_ops import sampling
from deepinfer_neuron.errors import ConfigError, RequestError
from tests.compat.outputs import Output
from tests.sampling import plain

I32, F32, U64 = torch.int32, torch.float32, torch.uint64
MTP_OFFSET = 1_000_000_007


def ints(values: object) -> Tensor:
    return torch.tensor(values, dtype=I32)


def seeds_of(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=U64)


def strided(x: Tensor) -> Tensor:
    """The same values in rows that are not adjacent."""
    wide = torch.full((x.shape[0], x.shape[1] + 7), 3.0)
    wide[:, 2 : 2 + x.shape[1]] = x
    return wide[:, 2 : 2 + x.shape[1]]


def test_kernels_are_made_once() -> None:
    assert sampling.random_sampling_tl(64, False) is sampling.random_sampling_tl(64, False)
    assert sampling.sum_smaller_probs_tl(64) is sampling.sum_smaller_probs_tl(64)
    assert sampling.fused_sample_tl(64, True, False) is sampling.fused_sample_tl(64, True, False)


@pytest.mark.parametrize("predict", [False, True])
@pytest.mark.parametrize(("rows", "width"), [(0, 64), (1, 64), (9, 1000), (3, 8192), (2, 129280)])
def test_random_sampling(rows: int, width: int, predict: bool) -> None:
    source = random.Random(width)
    probs = strided(torch.softmax(plain.logits(rows, width, seed=width), -1))
    before = probs.clone()
    seeds = [source.getrandbits(64) for _ in range(rows)]
    positions = [source.randrange(-(2**31), 2**31) for _ in range(rows)]
    out = Output((rows,), I32)
    kernel = sampling.random_sampling_tl(width, predict)
    kernel(probs, seeds_of(seeds), ints(positions), out.view)
    expected = [
        plain.draw(probs[r].tolist(), seeds[r], positions[r], int(predict)) for r in range(rows)
    ]
    out.check(ints(expected))
    assert torch.equal(probs, before)


@pytest.mark.parametrize("mass", [1.0, 0.5, 1e-4, 1e-9])
def test_a_single_possible_token_is_drawn(mass: float) -> None:
    probs, out = torch.zeros(40, 100), torch.zeros(40, dtype=I32)
    probs[torch.arange(40), torch.arange(40) * 2] = mass
    sampling.random_sampling_tl(100, False)(probs, seeds_of([2**63 + 1] * 40), ints([7] * 40), out)
    assert out.tolist() == list(range(0, 80, 2))


def test_nothing_to_draw_is_an_error() -> None:
    probs, out = torch.ones(3, 64) / 64, torch.zeros(3, dtype=I32)
    probs[1] = 2.0**-32
    with pytest.raises(RequestError, match="row 1"):
        sampling.random_sampling_tl(64, False)(probs, seeds_of([1, 2, 3]), ints([0, 0, 0]), out)


@pytest.mark.parametrize("equal", [False, True])
@pytest.mark.parametrize(("rows", "width"), [(0, 64), (1, 64), (5, 4032)])
def test_sum_of_smaller_probabilities(rows: int, width: int, equal: bool) -> None:
    logits = plain.logits(rows, width, seed=1).round()
    logprobs = torch.log_softmax(logits * 0 if equal else logits, -1)
    logprobs[:, 3] = -math.inf
    tokens = [(-1, 3, width - 1, 17, 40)[r] for r in range(rows)]
    out = Output((rows,), F32)
    sampling.sum_smaller_probs_tl(width)(strided(logprobs), ints(tokens), out.view)
    got = out.view.clone()
    out.check(got)
    for r, token in enumerate(tokens):
        line = logprobs[r].tolist()
        terms = [
            math.exp(lp)
            for j, lp in enumerate(line)
            if token >= 0 and (lp < line[token] or (lp == line[token] and j <= token))
        ]
        assert got[r].item() == pytest.approx(math.fsum(terms), abs=1e-5)


class Step:
    """Random arguments of the fused sampler."""

    def __init__(self, rows: int, width: int, seed: int, *, identity: bool = False) -> None:
        self.source = random.Random(seed)
        self.rows, self.width = rows, width
        logits = plain.logits(rows, width, seed)
        logits[1::3] = logits[1::3].clamp(-1, 1).round()  # ties
        logits[2::6, 16:] = -math.inf
        self.logits = strided(logits)
        self.temperatures = [self.source.choice([1e-5, 0.5, 1.0, 1.5]) for _ in range(rows)]
        self.top_ps = [self.source.choice([1.0, 0.9, 0.3, 2.2e-16]) for _ in range(rows)]
        self.top_ks = [self.source.choice([-1, 0, 1, 7, width, width + 9]) for _ in range(rows)]
        self.seeds = [self.source.getrandbits(64) for _ in range(rows)]
        self.positions = [self.source.randrange(2**31) for _ in range(rows)]
        self.verifies = [self.source.random() < 0.8 for _ in range(rows)]
        pool = rows if identity else rows + 4
        self.read = None if identity else [self.source.randrange(pool) for _ in range(rows)]
        self.draft_logprobs = strided(torch.log_softmax(plain.logits(pool, width, seed + 1), -1))
        self.draft_ids = [self.source.choice([-1, *range(width)]) for _ in range(pool)]
        self.logprobs = Output((rows, width), F32)
        self.candidates = Output((rows,), I32)
        self.accept = Output((rows,), torch.bool)
        self.selected, self.probs = Output((rows,), F32), Output((rows,), F32)

    def run(self, *, sample: bool = True, reject: bool = False, offset: int = 0) -> None:
        settings = torch.tensor([self.temperatures, self.top_ps]).T.contiguous()  # strided columns
        garbage = torch.empty(2, dtype=I32)
        kernel = sampling.fused_sample_tl(self.width, sample, reject)
        kernel(
            self.logits,
            settings[:, 0] if self.rows else torch.empty(0),
            settings[:, 1] if self.rows else torch.empty(0),
            ints(self.top_ks),
            ints(self.positions) if sample else None,
            seeds_of(self.seeds) if sample else None,
            torch.tensor(self.verifies, dtype=torch.bool) if reject else None,
            self.logprobs.view,
            self.candidates.view if sample else None,
            self.draft_logprobs if reject else self.logits,
            ints(self.read) if reject and self.read is not None else None,
            ints(self.draft_ids) if reject else garbage,
            self.accept.view if reject else None,
            self.selected.view if reject else None,
            self.probs.view if reject else None,
            offset,
            torch.empty(self.rows, 2),
        )

    def check_logprobs(self) -> None:
        """The transform in double precision; kept sets may differ where sums are that close."""
        got = self.logprobs.view
        for r in range(self.rows):
            values = self.logits[r].tolist()
            logprobs = plain.log_softmax(values, self.temperatures[r])
            top_k = self.top_ks[r] or 1
            kept = plain.kept(values, logprobs, self.top_ps[r], top_k)
            log_mass = math.log(math.fsum(math.exp(logprobs[j]) for j in kept))
            expected = [-math.inf] * self.width
            for j in kept:
                expected[j] = logprobs[j] - log_mass
            close = {"atol": 2e-4, "rtol": 1e-5}
            torch.testing.assert_close(got[r], torch.tensor(expected), **close)


@pytest.mark.parametrize("sample", [False, True])
@pytest.mark.parametrize(("rows", "width"), [(0, 64), (1, 64), (24, 64), (12, 640), (2, 8256)])
def test_fresh_samples(rows: int, width: int, sample: bool) -> None:
    step = Step(rows, width, seed=width)
    before = step.logits.clone()
    step.run(sample=sample, offset=MTP_OFFSET)
    assert torch.equal(step.logits, before)
    step.logprobs.check(step.logprobs.view.clone())
    step.check_logprobs()
    tokens = [
        plain.draw(step.logprobs.view[r].exp().tolist(), (seed + MTP_OFFSET) % 2**64, position)
        for r, (seed, position) in enumerate(zip(step.seeds, step.positions, strict=True))
    ]
    step.candidates.check(ints(tokens) if sample else step.candidates.before)


@pytest.mark.parametrize("identity", [False, True])
@pytest.mark.parametrize(("rows", "width"), [(0, 64), (1, 64), (40, 64), (3, 8256)])
def test_rejection(rows: int, width: int, identity: bool) -> None:
    step = Step(rows, width, seed=rows, identity=identity)
    step.run(reject=True)
    step.check_logprobs()
    for out in (step.candidates, step.accept, step.selected, step.probs, step.logprobs):
        out.check(out.view.clone())
    for r in range(rows):
        line = step.read[r] if step.read is not None else r
        draft, theirs = step.draft_ids[line], step.draft_logprobs[line]
        logprobs = step.logprobs.view[r]
        selected = theirs[draft].item() if draft >= 0 else -math.inf
        assert step.selected.view[r].item() == selected
        accepted, probability, weights, case = True, 1.0, logprobs.exp(), 0
        if step.verifies[r]:
            own = logprobs[draft].item() if draft >= 0 else -math.inf
            ratio = torch.tensor(own).sub(torch.tensor(selected)).clamp_max(0).exp().item()
            word = plain.words(step.seeds[r], step.positions[r], 2)[0]
            accepted = own > -math.inf and 2 * word + 1 < math.floor(ratio * 2**33)
            weights, case = (logprobs.exp() - (theirs - 5e-5).exp()).clamp_min(0), 1
            mass = sum(math.floor(w * 2**31) for w in weights.tolist()) / 2**31
            probability = max(1 - mass, 0.0)
        assert bool(step.accept.view[r]) is accepted
        assert step.probs.view[r].item() == pytest.approx(probability, abs=1e-7)
        token = plain.draw(weights.tolist(), step.seeds[r], step.positions[r], case)
        if accepted and step.verifies[r]:
            token = draft
        assert step.candidates.view[r].item() == token


def test_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, parts = (Step(40, 64, seed=8) for _ in range(2))
    whole.run(reject=True)
    monkeypatch.setattr(sampling, "_CHUNK_ELEMENTS", 3 * 64)
    parts.run(reject=True)
    for name in ("logprobs", "candidates", "accept", "selected", "probs"):
        getattr(parts, name).check(getattr(whole, name).view)


def test_ties_are_cut_by_id_and_zeros_have_no_sign() -> None:
    step = Step(3, 64, seed=1)
    step.logits.copy_(torch.zeros(3, 64))
    step.logits[:, ::2] = -0.0
    step.temperatures, step.top_ps, step.top_ks = [1.0] * 3, [1.0, 0.25, 1.0], [5, -1, 0]
    step.run(sample=False)
    kept = [line.isfinite().nonzero().flatten().tolist() for line in step.logprobs.view]
    # The mass before token 16 is exactly 0.25, which does not exceed it.
    assert kept == [list(range(5)), list(range(17)), [0]]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_unusable_logits_are_an_error(bad: float) -> None:
    step = Step(4, 64, seed=2)
    step.logits[2, 5 if bad != -math.inf else slice(None)] = bad
    with pytest.raises(RequestError, match="row 2"):
        step.run()


def test_senseless_sizes_are_refused() -> None:
    with pytest.raises(ConfigError):
        sampling.random_sampling_tl(0, False)
    with pytest.raises(ConfigError):
        sampling.sum_smaller_probs_tl(0)
    with pytest.raises(ConfigError):
        sampling.fused_sample_tl(0, True, True)
