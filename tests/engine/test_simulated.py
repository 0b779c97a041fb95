"""The whole engine on the simulated Neuron device, in strict mode: a broken rule is an error."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from deepinfer_neuron import LLM, SamplingParams
from deepinfer_neuron.checkpoint.reader import Checkpoint
from deepinfer_neuron.engine.build import Parts, build_engine
from deepinfer_neuron.engine.config import BucketOptions, EngineOptions
from deepinfer_neuron.engine.core import EngineCore, NewRequest
from deepinfer_neuron.ops.arithmetic import Arithmetic, FixedOrder
from deepinfer_neuron.platform.simulator import SimulatedNeuronPlatform, Simulator
from deepinfer_neuron.platform.simulator.counts import StepReport
from deepinfer_neuron.runner.static_worker import StaticWorker
from deepinfer_neuron.settings import Settings
from deepinfer_neuron.text.tokenizer import Tokenizer
from tests.conftest import CheckpointDir

NEXTN = 5
LAYERS = 9
LIMITS = {
    "max_model_len": 256,
    "max_num_seqs": 2,
    "max_num_batched_tokens": 64,
    "nextn": NEXTN,
    "num_blocks": 8,
}
BUCKETS = BucketOptions(prefill_rows=64)
LONG = list(range(10, 150))
"""More than a block, so that its first block can be shared."""
SHORT = [40, 7, 300, 7, 7]

pytestmark = pytest.mark.slow


def greedy(tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)


@pytest.fixture(scope="module")
def device(checkpoint_dir: CheckpointDir) -> Iterator[LLM]:
    """An engine whose warm-up has compiled everything."""
    with LLM(
        checkpoint_dir("nano"), device="neuron", simulate=True, buckets=BUCKETS, **LIMITS
    ) as llm:
        yield llm


def worker_of(llm: LLM) -> StaticWorker:
    worker = llm.engine.executor.worker
    assert isinstance(worker, StaticWorker)
    return worker


def simulator_of(llm: LLM) -> Simulator:
    platform = worker_of(llm).platform
    assert isinstance(platform, SimulatedNeuronPlatform)
    return platform.simulator


def reports(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> list[StepReport]:
    """Collects the reports of the steps from here on."""
    kept: list[StepReport] = []
    simulator = simulator_of(llm)
    end = simulator.end_step

    def watch() -> StepReport:
        kept.append(end())
        return kept[-1]

    monkeypatch.setattr(simulator, "end_step", watch)
    return kept


def test_requests_of_every_kind_break_no_rule(device: LLM) -> None:
    """Greedy, sampled, with logprobs, with prompt scores, forced, penalised; a shared prefix."""
    params = [
        greedy(12),
        SamplingParams(temperature=0.9, top_p=0.8, seed=3, max_tokens=8, ignore_eos=True),
        SamplingParams(temperature=0.0, logprobs=3, prompt_logprobs=1, max_tokens=6),
        SamplingParams(temperature=0.0, repetition_penalty=1.3, min_tokens=4, max_tokens=6),
        SamplingParams(temperature=0.0, golden_token_ids=[9, 8, 7], max_tokens=5, ignore_eos=True),
    ]
    prompts = [{"prompt_token_ids": ids} for ids in (LONG, SHORT, SHORT, SHORT, [5])]
    outputs = device.generate(prompts, params, use_tqdm=False)
    assert [output.outputs[0].finish_reason for output in outputs] != ["error"] * 5
    assert all(output.outputs[0].finish_reason in ("length", "stop") for output in outputs)
    assert outputs[4].outputs[0].token_ids[:3] == [9, 8, 7]
    again = device.generate(prompts[0], greedy(12), use_tqdm=False)[0]
    assert again.metrics.num_cached_tokens == 128
    assert again.outputs[0].token_ids == outputs[0].outputs[0].token_ids
    assert simulator_of(device).report().violations == ()
    stats = device.stats().device
    assert stats is not None
    assert stats.graphs_after_warm_up == 0


def test_a_decode_step_is_one_upload_and_one_download(
    device: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also: no operator outside a region, nothing compiled, at most 3 regions per layer and 10."""
    kept = reports(device, monkeypatch)
    device.generate({"prompt_token_ids": SHORT}, greedy(16), use_tqdm=False)
    assert len(kept) > 3
    for report in kept:
        counts = report.counts
        assert (counts.uploads, counts.downloads, counts.blocking) == (1, 1, 0)
        assert (counts.eager, counts.graphs) == (0, 0)
        assert counts.regions <= 3 * LAYERS + 10
        assert report.violations == ()


def test_steps_are_alike(device: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every decode step of a sequence launches the same regions at the same shapes."""
    kept = reports(device, monkeypatch)
    device.generate({"prompt_token_ids": SHORT}, greedy(20), use_tqdm=False)
    decode = {report.sequence for report in kept[1:]}
    assert len(decode) == 1


def engine(checkpoint: Checkpoint, platform: SimulatedNeuronPlatform | None) -> EngineCore:
    """Fixed order of sums; on the simulated device with 64-bit floats."""
    from deepinfer_neuron.platform import CpuPlatform

    arithmetic = Arithmetic(FixedOrder(), graph=platform is not None)
    options = EngineOptions(buckets=BUCKETS, asynchronous=False, **LIMITS)
    config = options.resolve(checkpoint.config, 1 << 32)
    tokenizer = Tokenizer.load(checkpoint.directory, checkpoint.config)
    place = platform if platform is not None else CpuPlatform()
    parts = Parts(checkpoint, tokenizer, Settings(), arithmetic, False, place, False)
    return build_engine(parts, config)


def run(core: EngineCore) -> list[tuple[object, ...]]:
    """Tokens and log-probabilities of a few requests."""
    params = [
        greedy(24),
        SamplingParams(temperature=0.0, logprobs=2, max_tokens=16, ignore_eos=True),
        greedy(20),
    ]
    tracked = [
        core.add(NewRequest(str(place), ids, wanted, seed=place))
        for place, (ids, wanted) in enumerate(zip((LONG, SHORT, [5]), params, strict=True))
    ]
    while core.has_unfinished:
        core.step()
    outputs = [item.completion.output() for item in tracked]
    return [(o.token_ids, o.logprobs, o.finish_reason) for o in outputs]


def test_tokens_and_logprobs_equal_the_host_bit_for_bit(checkpoint_dir: CheckpointDir) -> None:
    """With the order of sums fixed and 64-bit floats allowed, nothing is left to differ."""
    with Checkpoint.open(checkpoint_dir("nano")) as checkpoint:
        host = engine(checkpoint, None)
        expected = run(host)
        host.close()
        # The fixed order is for hosts: its sums use what the rules of the device refuse.
        device = engine(checkpoint, SimulatedNeuronPlatform(simulator=Simulator(mode="off")))
        assert run(device) == expected
        device.close()
