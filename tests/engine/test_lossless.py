"""Drafts change when tokens come, never which: compared with runs without drafts.

With the fixed-order arithmetic the comparison of greedy requests is bitwise, log-probabilities
included. Random checkpoints seldom accept a draft, so the drafts come from recorded runs, spoiled
with a known probability: every pattern of acceptance occurs, and a planted fault is seen.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from torch import Tensor

from deepinfer_neuron.engine.budget import StepCurve
from deepinfer_neuron.engine.outputs import RequestOutput
from deepinfer_neuron.errors import ConfigError
from deepinfer_neuron.llm import LLM
from deepinfer_neuron.runner.sequence import SequenceData
from deepinfer_neuron.sampling.drafts import Draft
from deepinfer_neuron.sampling.params import SamplingParams
from deepinfer_neuron.sampling.structured import StructuredOutput
from tests.engine.test_invariance import crowded, run_crowd
from tests.support.draft_sources import Recorded
from tests.support.engine_load import lone_runs, random_wishes, result

CheckpointDir = Callable[..., Path]
VOCABULARY = 512
Tokens = tuple[int, ...]
Results = list[tuple[list[int], object]]


def random_prompts(rng: random.Random, count: int) -> list[Tokens]:
    """Lengths around block borders among others; some share a prefix of a whole block."""
    base = [rng.randrange(3, VOCABULARY) for _ in range(128)]
    prompts = []
    for _ in range(count):
        length = rng.choice([1, 2, rng.randint(1, 40), 40, 126, 127, 128, 129, 140])
        head = base if length > 128 and rng.random() < 0.5 else []
        tail = [rng.randrange(3, VOCABULARY) for _ in range(length - len(head))]
        prompts.append((*head, *tail))
    return prompts


def engine(directory: Path, nextn: int, **limits: int | bool) -> LLM:
    settings: dict[str, int | bool] = {"max_model_len": 512, "max_num_seqs": 32, **limits}
    return LLM(directory, nextn=nextn, batch_invariant=True, **settings)  # type: ignore[arg-type]


def greedy(tokens: int, **wishes: object) -> SamplingParams:
    settings = {"max_tokens": tokens, "logprobs": 1, "ignore_eos": True, **wishes}
    return SamplingParams(temperature=0.0, **settings)  # type: ignore[arg-type]


def run(llm: LLM, prompts: Sequence[Tokens], params: SamplingParams) -> Results:
    outputs = llm.generate(
        [{"prompt_token_ids": list(prompt)} for prompt in prompts], params, use_tqdm=False
    )
    return [comparable(output) for output in outputs]


def comparable(output: RequestOutput) -> tuple[list[int], object]:
    completion = output.outputs[0]
    return completion.token_ids, (completion.logprobs, completion.finish_reason, completion.text)


def wrong_tokens(found: Results, expected: Results) -> int:
    """Requests with another outcome, counted by their first wrong token."""
    return sum(a != b for a, b in zip(found, expected, strict=True))


def propose_from(llm: LLM, source: Recorded) -> Recorded:
    llm.engine.executor.source = source
    return source


def check_lossless(
    directory: Path, seed: int, count: int, tokens: int, settings: list[tuple[int, float]]
) -> None:
    rng = random.Random(seed)
    prompts, params = random_prompts(rng, count), greedy(tokens)
    with engine(directory, 0) as llm:
        expected = run(llm, prompts, params)
    continuations = {p: r[0] for p, r in zip(prompts, expected, strict=True)}
    for nextn, quality in settings:
        limits = {
            "max_num_batched_tokens": rng.choice([150, 300, 512]),
            "num_blocks": rng.choice([20, 80]),
            "asynchronous": rng.random() < 0.7,
            "enable_prefix_caching": rng.random() < 0.7,
            "max_num_seqs": rng.choice([7, 16]),
        }
        with engine(directory, nextn, **limits) as llm:
            propose_from(llm, Recorded(continuations, quality, VOCABULARY, rng))
            assert run(llm, prompts, params) == expected
            stats = llm.stats()
            assert stats.decode.tokens_per_step > 1.3
            assert min(stats.decode.acceptance[:1]) > 0.3
            assert stats.blocks_used == 0


@pytest.mark.parametrize("wild", [False, True])
def test_greedy_with_spoiled_drafts(checkpoint_dir: CheckpointDir, wild: bool) -> None:
    check_lossless(checkpoint_dir("nano", 1, wild=wild), 5 + wild, 6, 30, [(2, 0.7), (7, 0.9)])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seed", "nextn", "quality"), [(0, 3, 0.7), (1, 5, 0.9), (2, 7, 0.95), (3, 1, 0.6)]
)
def test_greedy_over_thirty_thousand_tokens(
    checkpoint_dir: CheckpointDir, seed: int, nextn: int, quality: float
) -> None:
    """4 x 75 prompts x 100 tokens: a rate of 0.01 % is three faults."""
    directory = checkpoint_dir("nano", seed, wild=seed % 2 == 1)
    check_lossless(directory, seed, 75, 100, [(nextn, quality)])


@pytest.mark.parametrize("nextn", [1, 5, 7])
def test_greedy_with_the_models_own_drafts(checkpoint_dir: CheckpointDir, nextn: int) -> None:
    directory, rng = checkpoint_dir("nano", 2), random.Random(nextn)
    prompts, params = random_prompts(rng, 4), greedy(16)
    with engine(directory, 0) as llm:
        expected = run(llm, prompts, params)
    with engine(directory, nextn, max_num_batched_tokens=200) as llm:
        assert run(llm, prompts, params) == expected
        assert llm.stats().decode.verified[nextn - 1] > 0


@pytest.mark.parametrize("varlen", ["0", "1"])
def test_a_crowd_with_drafts_gets_the_results_of_lone_runs(
    checkpoint_dir: CheckpointDir, varlen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All kinds of parameters, preemption, aborts. Draws repeat only with a fixed block length."""
    monkeypatch.setenv("DEEPINFER_ENABLE_MTP_VARLEN", varlen)
    directory, rng = checkpoint_dir("nano", 3), random.Random(11)
    wishes = random_wishes(rng, 7, VOCABULARY, 150, most_tokens=16)
    if varlen == "1":
        wishes = [wish for wish in wishes if wish.params.temperature == 0.0]
    expected = lone_runs(directory, wishes, nextn=0 if varlen == "1" else 4)
    with crowded(directory, rng, nextn=4) as llm:
        crowd = run_crowd(llm, wishes, rng)
        compared = 0
        for item, (completion, prompt) in zip(crowd, expected, strict=True):
            got = result(item)
            if got[0].finish_reason == "abort":
                assert got[0].token_ids == completion.token_ids[: len(got[0].token_ids)]
            else:
                assert got == (completion, prompt)
                compared += 1
        assert compared >= len(wishes) // 2
        assert sum(llm.stats().decode.verified) > 0


@pytest.fixture(scope="module")
def recorded(checkpoint_dir: CheckpointDir) -> tuple[Path, Tokens, list[int]]:
    """A checkpoint, a prompt, and its 40 greedy tokens without drafts."""
    directory, prompt = checkpoint_dir("nano", 1), (5, 9, 14, 77)
    with engine(directory, 0) as llm:
        return directory, prompt, run(llm, [prompt], greedy(40))[0][0]


class TestEnds:
    """Where a block of drafts meets the end of a request."""

    @contextmanager
    def oracle(self, recorded: tuple[Path, Tokens, list[int]], **limits: int) -> Iterator[LLM]:
        directory, prompt, tokens = recorded
        with engine(directory, 7, **limits) as llm:
            propose_from(llm, Recorded({prompt: tokens}, 1.0, VOCABULARY, cuts=0.0))
            yield llm

    @pytest.mark.parametrize("budget", [1, 2, 3, 7, 8, 9, 10, 17])
    def test_max_tokens_is_exact(
        self, recorded: tuple[Path, Tokens, list[int]], budget: int
    ) -> None:
        with self.oracle(recorded) as llm:
            found = run(llm, [recorded[1]], greedy(budget))[0]
            assert found[0] == recorded[2][:budget]
            assert llm.stats().decode.verified[6] == (budget - 1) // 8

    @pytest.mark.parametrize("place", [1, 2, 6, 7, 8, 9])
    def test_a_stop_token_inside_a_block(
        self, recorded: tuple[Path, Tokens, list[int]], place: int
    ) -> None:
        stop = recorded[2][place]
        first = recorded[2].index(stop)
        params = greedy(40, stop_token_ids=[stop])
        with self.oracle(recorded) as llm:
            assert run(llm, [recorded[1]], params)[0][0] == recorded[2][: first + 1]
            assert llm.stats().finished == {"stop": 1}
            assert llm.stats().blocks_used == 0

    @pytest.mark.parametrize("place", [2, 5, 9])
    def test_a_stop_string_inside_a_block(
        self, recorded: tuple[Path, Tokens, list[int]], place: int
    ) -> None:
        """Text, tokens and counts end where they do without drafts."""
        with engine(recorded[0], 0) as llm:
            stop = llm.tokenizer.decode(recorded[2][place : place + 2])
            assert stop
            params = greedy(40, stop=(stop,))
            expected = run(llm, [recorded[1]], params)
            plain = llm.stats()
            assert plain.finished == {"stop": 1}
        with self.oracle(recorded) as llm:
            assert run(llm, [recorded[1]], params) == expected
            assert llm.stats().decode_tokens == plain.decode_tokens

    def test_counts_end_with_the_request(self, recorded: tuple[Path, Tokens, list[int]]) -> None:
        """A stop token among accepted drafts: what lies behind it was never judged."""
        stop = recorded[2][3]
        assert recorded[2].index(stop) == 3
        with self.oracle(recorded) as llm:
            run(llm, [recorded[1]], greedy(40, stop_token_ids=[stop]))
            stats = llm.stats()
        assert stats.decode_tokens == 3
        assert stats.decode.accepted[:3] == stats.decode.reached[:3] == [1, 1, 0]

    def test_min_tokens_holds_the_end_back_inside_a_block(
        self, recorded: tuple[Path, Tokens, list[int]]
    ) -> None:
        params = greedy(12, stop_token_ids=[recorded[2][3]], min_tokens=8)
        with engine(recorded[0], 0) as llm:
            expected = run(llm, [recorded[1]], params)
        with self.oracle(recorded) as llm:
            assert run(llm, [recorded[1]], params) == expected

    @pytest.mark.parametrize("room", [0, 1, 2, 7])
    def test_the_longest_sequence(
        self, recorded: tuple[Path, Tokens, list[int]], room: int
    ) -> None:
        """``max_model_len`` at, and just above, a multiple of the block; the smallest pool."""
        length = 4 + 8 * 4 + room
        with self.oracle(recorded, max_model_len=length, num_blocks=2, max_num_seqs=1) as llm:
            tokens, (_, reason, _) = run(llm, [recorded[1]], greedy(500))[0]  # type: ignore[misc]
        assert tokens == recorded[2][: length - 4]
        assert reason == "length"

    def test_forced_tokens_override_drafts(self, recorded: tuple[Path, Tokens, list[int]]) -> None:
        forced = [*recorded[2][:3], 77, -1, -1, 9]
        params = greedy(9, golden_token_ids=tuple(forced))
        with engine(recorded[0], 0) as llm:
            expected = run(llm, [recorded[1]], params)
        with self.oracle(recorded) as llm:
            assert run(llm, [recorded[1]], params) == expected
            assert expected[0][0][3] == 77


@pytest.mark.parametrize(
    "output",
    [
        StructuredOutput(regex="[a-c]{6,30}(yes|no)!"),
        StructuredOutput(json_schema='{"type": "array", "items": {"type": "integer"}}'),
    ],
)
def test_a_grammar_inside_blocks(checkpoint_dir: CheckpointDir, output: StructuredOutput) -> None:
    """Right, refused and illegal drafts; the grammar may end in the middle of a block."""
    directory, prompts = checkpoint_dir("nano", 1), [(5, 6), (40, 2, 9), (300,)]
    params = SamplingParams(temperature=0.0, max_tokens=40, logprobs=1, structured_output=output)
    with engine(directory, 0) as llm:
        expected = run(llm, prompts, params)
    continuations = {p: r[0] for p, r in zip(prompts, expected, strict=True)}
    for quality in (1.0, 0.8):
        with engine(directory, 5) as llm:
            propose_from(llm, Recorded(continuations, quality, VOCABULARY))
            assert run(llm, prompts, params) == expected
            assert llm.stats().decode.tokens_per_step > 1.5


class TestSettings:
    def test_the_checkpoint_decides_unless_told_otherwise(
        self, checkpoint_dir: CheckpointDir, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        directory = checkpoint_dir("nano", 1)
        with LLM(directory) as llm:
            draft = llm.checkpoint.config.draft
            assert draft is not None
            assert llm.config.nextn == draft.block_size
        monkeypatch.setenv("DEEPINFER_USE_NEXTN_DECODE", "2")
        with LLM(directory) as llm:
            assert llm.config.nextn == 2
        with LLM(directory, nextn=0) as llm:
            assert llm.config.nextn == 0
            assert llm.engine.executor.worker.network.drafts is None

    @pytest.mark.parametrize("nextn", [-1, 8, True, "3"])
    def test_a_count_out_of_range(self, checkpoint_dir: CheckpointDir, nextn: object) -> None:
        with pytest.raises(ConfigError, match=r"nextn is .*; give an integer from 0 to 7"):
            LLM(checkpoint_dir("nano", 1), nextn=nextn)  # type: ignore[arg-type]

    def test_temperatures_must_fit(
        self, checkpoint_dir: CheckpointDir, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("DEEPINFER_DFLASH_CONFIDENCE_HEAD_TEMPERATURE", "1,2")
        with pytest.raises(ConfigError, match="has 2 numbers; give one, or 3 for nextn 3"):
            LLM(checkpoint_dir("nano", 1), nextn=3)
        monkeypatch.setenv("DEEPINFER_DFLASH_CONFIDENCE_HEAD_TEMPERATURE", "1,2,4")
        LLM(checkpoint_dir("nano", 1), nextn=3).close()

    def test_step_times_need_no_more_blocks_than_there_are(
        self, checkpoint_dir: CheckpointDir, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("DEEPINFER_ENABLE_MTP_VARLEN", "1")
        with LLM(
            checkpoint_dir("nano", 1), nextn=7, max_num_seqs=8, max_model_len=16, num_blocks=2
        ) as llm:
            assert len(run(llm, [(5, 6)], greedy(4))[0][0]) == 4

    def test_measured_step_times_are_kept(
        self, checkpoint_dir: CheckpointDir, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.setenv("DEEPINFER_ENABLE_MTP_VARLEN", "1")
        monkeypatch.setenv("DEEPINFER_DECODE_PERF_CACHE_DIR", str(tmp_path))
        curves = []
        for _ in range(2):
            with LLM(checkpoint_dir("nano", 1), nextn=3, max_num_seqs=2) as llm:
                budget = llm.engine.scheduler.budget
                assert budget is not None
                curves.append(budget.curve)
        assert len(list(tmp_path.iterdir())) == 1
        assert curves[0] == curves[1]
        assert curves[0].rows == (1, 2, 4, 8)

    def test_the_budget_limits_verified_rows(
        self, checkpoint_dir: CheckpointDir, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Where every row costs as much as a step, hopeless drafts are not verified."""
        monkeypatch.setenv("DEEPINFER_ENABLE_MTP_VARLEN", "1")
        with engine(checkpoint_dir("nano", 1), 5, max_num_seqs=4) as llm:
            budget = llm.engine.scheduler.budget
            assert budget is not None
            budget.curve = StepCurve((1, 24), (1e3, 24e3))
            run(llm, [(5, 9), (7,), (8, 3)], greedy(12))
            stats = llm.stats()
            assert stats.decode_rows < 1.5 * stats.decode.steps


def test_metrics_tell_what_drafts_brought(recorded: tuple[Path, Tokens, list[int]]) -> None:
    directory, prompt, tokens = recorded
    with engine(directory, 4) as llm:
        propose_from(llm, Recorded({prompt: tokens}, 1.0, VOCABULARY, cuts=0.0))
        output = llm.generate({"prompt_token_ids": list(prompt)}, greedy(11), use_tqdm=False)[0]
        stats = llm.stats()
    decode = output.metrics.decode
    assert decode == stats.decode
    assert decode.steps == 2
    assert decode.verified == decode.accepted == [2, 2, 2, 2, 0, 0, 0]
    assert decode.tokens_per_step == 5.0
    assert decode.acceptance == [1.0] * 4
    assert len(decode.mean_confidence) == 4
    assert all(0.0 <= share <= 1.0 for share in decode.mean_confidence)
    assert stats.decode_tokens == 10
    assert stats.decode_rows == 10
    assert 0.0 < stats.draft_seconds < stats.step_seconds
    parts = stats.forward_seconds + stats.sample_seconds + stats.draft_seconds
    assert parts == pytest.approx(stats.step_seconds)


def test_one_and_sixty_five_requests(checkpoint_dir: CheckpointDir) -> None:
    directory = checkpoint_dir("nano", 1)
    prompts = [(3 + i, 100 + i) for i in range(65)]
    with engine(directory, 0, max_num_seqs=65) as llm:
        expected = run(llm, prompts, greedy(6))
    with engine(directory, 3, max_num_seqs=65) as llm:
        assert run(llm, prompts, greedy(6)) == expected
        assert run(llm, prompts[:1], greedy(6)) == expected[:1]


def test_a_prefix_hit_drafts_like_a_computed_prefix(checkpoint_dir: CheckpointDir) -> None:
    """The draft blocks' keys come back with a cached prefix: the same drafts follow."""
    directory, prompt = checkpoint_dir("nano", 1), [7 + i % 50 for i in range(300)]
    proposed: list[list[tuple[int, float]]] = []

    def watch(data: SequenceData, drafts: Sequence[Draft]) -> Sequence[Draft]:
        proposed[-1] += [(draft.token_id, draft.confidence) for draft in drafts]
        return drafts

    with engine(directory, 5, max_num_batched_tokens=128, max_num_seqs=2) as llm:
        llm.engine.executor.source = watch
        for _ in range(2):
            proposed.append([])
            run(llm, [tuple(prompt)], greedy(12))
        assert llm.stats().prefix_hit_rate > 0.4
    assert proposed[0]
    assert proposed[0] == proposed[1]


class Fault:
    """Logits in which once in so many rows another token is the largest."""

    def __init__(self, every: int) -> None:
        self.every = every
        self.count = 0

    def spoil(self, logits: Tensor) -> Tensor:
        logits = logits.clone()
        for row in range(logits.shape[0]):
            self.count += 1
            if self.count % self.every == 0:
                logits[row, int(logits[row].argmin())] = 1e4
        return logits


@pytest.mark.slow
def test_the_comparison_sees_one_wrong_token_in_ten_thousand(
    checkpoint_dir: CheckpointDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, rng = checkpoint_dir("nano", 1), random.Random(3)
    prompts, params = random_prompts(rng, 40), greedy(260, logprobs=None)
    with engine(directory, 0) as llm:
        expected = run(llm, prompts, params)
    continuations = {p: r[0] for p, r in zip(prompts, expected, strict=True)}
    with engine(directory, 7) as llm:
        propose_from(llm, Recorded(continuations, 1.0, VOCABULARY, rng))
        fault, head = Fault(10_000), llm.engine.executor.worker.logits
        monkeypatch.setattr(
            llm.engine.executor.worker, "logits", lambda hidden: fault.spoil(head(hidden))
        )
        assert wrong_tokens(run(llm, prompts, params), expected) == 1
