"""The engine over passes of static shape against the ragged engine, bit for bit.

Both use the fixed order of sums. The regions are plain calls here, so what is tested is everything
around them: passes out of the bucket ladder, padding, verification and drafts on the device,
choices on the host, prefix caching, preemption.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from deepinfer_neuron import LLM, SamplingParams
from deepinfer_neuron.engine.config import BucketOptions
from deepinfer_neuron.engine.outputs import RequestOutput
from deepinfer_neuron.errors import ConfigError, PlatformError
from deepinfer_neuron.platform import CpuPlatform
from deepinfer_neuron.platform.regions import Regions
from deepinfer_neuron.runner.sequence import SequenceData
from deepinfer_neuron.sampling.drafts import Draft
from tests.conftest import CheckpointDir

Request = tuple[list[int], SamplingParams]

BUCKETS = BucketOptions(prefill_rows=8, context=256, warm_up_seconds=0)


@pytest.fixture(autouse=True)
def plain_regions(monkeypatch: pytest.MonkeyPatch) -> None:
    """``compile="regions"`` on the CPU without a compiler."""
    monkeypatch.setattr(CpuPlatform, "make_regions", lambda self, compile=None: Regions())


def requests(seed: int, count: int, *, sampled: bool) -> list[Request]:
    """Random prompts, some with a common beginning, with parameters of every kind."""
    rng = random.Random(seed)
    shared = [rng.randrange(5, 450) for _ in range(140)]
    made = []
    for place in range(count):
        length = rng.choice((1, 2, 7, 8, 9, 31, 60))
        prompt = [rng.randrange(5, 450) for _ in range(length)]
        if place % 3 == 0:
            prompt = shared + prompt
        params = {"max_tokens": rng.randint(1, 14), "ignore_eos": True, "temperature": 0.0}
        kind = rng.randrange(6)
        if kind == 0:
            params |= {"logprobs": 2}
        if kind == 1:
            params |= {"prompt_logprobs": 1}
        if kind == 2:
            params |= {"repetition_penalty": 1.2, "min_tokens": 1}
        if kind == 3 and sampled:
            params |= {"temperature": 0.8, "seed": place, "top_k": 40}
        if kind == 4:
            params |= {"stop_token_ids": list(range(0, 500, 9))}
        made.append((prompt, SamplingParams(**params)))
    return made


def results(outputs: Sequence[RequestOutput]) -> list[tuple[object, ...]]:
    return [
        (
            output.outputs[0].token_ids,
            output.outputs[0].finish_reason,
            output.outputs[0].logprobs,
            output.prompt_logprobs,
        )
        for output in outputs
    ]


def run(llm: LLM, wanted: Sequence[Request]) -> list[tuple[object, ...]]:
    prompts = [{"prompt_token_ids": prompt} for prompt, _ in wanted]
    return results(llm.generate(prompts, [params for _, params in wanted], use_tqdm=False))


@pytest.mark.parametrize(
    ("nextn", "sequences", "rows", "blocks"),
    [
        (0, 3, 32, 7),
        (5, 1, 16, 8),
        (5, 3, 32, 7),
        pytest.param(0, 5, 64, 12, marks=pytest.mark.slow),
        pytest.param(3, 1, 16, 8, marks=pytest.mark.slow),
        pytest.param(3, 3, 32, 7, marks=pytest.mark.slow),
        pytest.param(3, 5, 64, 12, marks=pytest.mark.slow),
        pytest.param(5, 5, 64, 12, marks=pytest.mark.slow),
    ],
)
def test_random_requests_equal_the_ragged_engine(
    nextn: int, sequences: int, rows: int, blocks: int, checkpoint_dir: CheckpointDir
) -> None:
    """Few blocks force preemption; sampled requests draw alike where no drafts are involved."""
    limits = {
        "nextn": nextn, "max_num_seqs": sequences, "max_num_batched_tokens": rows,
        "num_blocks": blocks, "max_model_len": 256, "batch_invariant": True,
    }  # fmt: skip
    wanted = requests(nextn * 10 + sequences, 7, sampled=nextn == 0)
    with LLM(checkpoint_dir("nano"), **limits) as host:
        expected = run(host, wanted)
    with LLM(checkpoint_dir("nano"), compile="regions", buckets=BUCKETS, **limits) as static:
        assert run(static, wanted) == expected
        assert run(static, wanted[:3]) == expected[:3]
        stats = static.stats()
        assert stats.prefix_hit_rate > 0
        assert stats.device is not None
        assert stats.device.uploads >= stats.device.passes


def test_drafts_are_verified_and_counted(checkpoint_dir: CheckpointDir) -> None:
    """Decode counts of the two engines agree, request by request."""
    limits = {"nextn": 5, "max_num_seqs": 2, "max_model_len": 256, "batch_invariant": True}
    prompts = [{"prompt_token_ids": [7, 9, 11]}, {"prompt_token_ids": [400, 3]}]
    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    counts = []
    for extra in ({}, {"compile": "regions", "buckets": BUCKETS}):
        with LLM(checkpoint_dir("nano"), **limits, **extra) as llm:
            outputs = llm.generate(prompts, params, use_tqdm=False)
            counts.append([output.metrics.decode for output in outputs])
    assert counts[0] == counts[1]
    assert sum(counts[0][0].reached) > 0


def test_a_step_without_rows_is_no_error(
    checkpoint_dir: CheckpointDir, caplog: pytest.LogCaptureFixture
) -> None:
    """Planned behind drafts that turn out to end the sequence, a step has nothing left to do."""
    directory = checkpoint_dir("nano")
    prompt = {"prompt_token_ids": [7, 9, 11]}
    golden = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    with LLM(
        directory, compile="regions", buckets=BUCKETS, nextn=3, max_num_seqs=1, max_model_len=128
    ) as llm:
        expected = llm.generate(prompt, golden, use_tqdm=False)[0].outputs[0].token_ids

        def right(data: SequenceData, drafts: Sequence[Draft]) -> Sequence[Draft]:
            place = len(data) - 3
            return [Draft(token) for token in expected[place : place + len(drafts)]]

        llm.engine.executor.source = right
        for count in range(2, 12):
            params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
            output = llm.generate(prompt, params, use_tqdm=False)[0]
            assert output.outputs[0].token_ids == expected[:count]
            assert output.outputs[0].finish_reason == "length"
    assert not [record for record in caplog.records if "failed" in record.message]


def test_sampled_requests_with_drafts_are_served(checkpoint_dir: CheckpointDir) -> None:
    """Their drafts are the most probable tokens here, so tokens differ, but all are given."""
    params = SamplingParams(temperature=1.0, seed=5, max_tokens=20, ignore_eos=True, n=2)
    with LLM(
        checkpoint_dir("nano"), compile="regions", buckets=BUCKETS, nextn=3, max_model_len=128
    ) as llm:
        first, second = (
            llm.generate({"prompt_token_ids": [5, 6]}, params, use_tqdm=False)[0] for _ in range(2)
        )
    assert [len(item.token_ids) for item in first.outputs] == [20, 20]
    assert [item.token_ids for item in first.outputs] == [i.token_ids for i in second.outputs]


def test_variable_drafts_are_budgeted(
    checkpoint_dir: CheckpointDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Confidence scheduling measures passes instead of ragged steps; greedy tokens stay."""
    limits = {"nextn": 5, "max_num_seqs": 2, "max_model_len": 128, "batch_invariant": True}
    wanted = [([7, 9], SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True))]
    with LLM(checkpoint_dir("nano"), **limits) as host:
        expected = run(host, wanted)
    monkeypatch.setenv("DEEPINFER_ENABLE_MTP_VARLEN", "1")
    with LLM(checkpoint_dir("nano"), compile="regions", buckets=BUCKETS, **limits) as static:
        assert run(static, wanted) == expected


def test_a_complete_warm_up_leaves_nothing_to_compile(checkpoint_dir: CheckpointDir) -> None:
    buckets = BucketOptions(prefill_rows=16, context=128)
    with LLM(
        checkpoint_dir("nano"), compile="regions", buckets=buckets, nextn=2, max_num_seqs=3,
        max_num_batched_tokens=32, max_model_len=256,
    ) as llm:  # fmt: skip
        before = llm.stats().device
        run(llm, requests(3, 8, sampled=True))
        after = llm.stats().device
    assert before is not None
    assert after is not None
    assert after.graphs == before.graphs
    assert after.graphs_after_warm_up == 0
    assert after.regions_launched > before.regions_launched


def test_a_warm_up_may_be_cut_short(
    checkpoint_dir: CheckpointDir, caplog: pytest.LogCaptureFixture
) -> None:
    """Graphs that it left out are compiled when they are needed, and not counted as late."""
    buckets = BucketOptions(prefill_rows=16, warm_up_seconds=1e-9)
    with LLM(
        checkpoint_dir("nano"), compile="regions", buckets=buckets, nextn=0, max_num_seqs=2,
        max_model_len=256,
    ) as llm:  # fmt: skip
        assert "warm-up stopped" in caplog.text
        run(llm, requests(4, 2, sampled=False))
        stats = llm.stats().device
    assert stats is not None
    assert stats.graphs > 0
    assert stats.graphs_after_warm_up == 0


@pytest.mark.parametrize(
    "buckets",
    [
        BucketOptions(prefill_rows=0),
        BucketOptions(context=0),
        BucketOptions(warm_up_seconds=-1),
        BucketOptions(warm_up_seconds=float("nan")),
    ],
    ids=["no rows", "no context", "negative time", "nan"],
)
def test_impossible_buckets_are_refused(
    buckets: BucketOptions, checkpoint_dir: CheckpointDir
) -> None:
    with pytest.raises(ConfigError, match="give"):
        LLM(checkpoint_dir("nano"), compile="regions", buckets=buckets)


def test_unknown_ways_to_compile_are_refused(checkpoint_dir: CheckpointDir) -> None:
    with pytest.raises(PlatformError, match="compile='fast' is not known"):
        LLM(checkpoint_dir("nano"), compile="fast")  # type: ignore[arg-type]
