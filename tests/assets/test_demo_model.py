"""The checkpoint inside the package: it is whole, small, and what runs when no model is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import deepinfer_neuron.assets as assets
from deepinfer_neuron import LLM, SamplingParams
from deepinfer_neuron.assets import DEMO_MODEL, HELD_OUT_FILE, demo_model, model_or_demo
from deepinfer_neuron.checkpoint.config import load_config
from deepinfer_neuron.checkpoint.reader import Checkpoint
from deepinfer_neuron.checkpoint.schedule import Role
from deepinfer_neuron.cli.main import main
from deepinfer_neuron.errors import CheckpointError
from deepinfer_neuron.reference import Network, golden

PROMPT = "And it came to pass in those days, that"


def test_it_has_every_part_of_the_architecture_and_fits_the_package() -> None:
    config = load_config(demo_model())
    assert {layer.role for layer in config.layers} == set(Role)
    assert {layer.ratio for layer in config.layers} == {0, 1, 2}
    assert config.candidate_source_layer_id is not None
    assert config.engram is not None
    assert config.draft is not None
    assert config.hc_mult == 4
    assert config.n_routed_experts > config.num_experts_per_tok > 1
    assert sum(file.stat().st_size for file in DEMO_MODEL.iterdir()) <= 16 * 1024 * 1024


def test_every_tensor_is_there_and_finite() -> None:
    with Checkpoint.open(demo_model()) as checkpoint:
        weights = [spec for spec in checkpoint.specs.values() if spec.dtype in ("BF16", "F32")]
        assert len(weights) > 100
        for spec in weights:
            assert bool(checkpoint.tensor(spec.name).isfinite().all()), spec.name


def test_golden_tokens_are_those_of_the_reference() -> None:
    short = golden.load(demo_model())[0]
    with Checkpoint.open(demo_model()) as checkpoint:
        logits = Network(checkpoint).logits(short.prompt_token_ids + short.token_ids[:-1])
    chosen = logits[len(short.prompt_token_ids) - 1 :].argmax(1)
    assert chosen.tolist() == short.token_ids


@pytest.mark.parametrize("nextn", [0, 5])
def test_the_engine_reproduces_the_golden_tokens(nextn: int) -> None:
    with LLM(nextn=nextn, max_model_len=256) as llm:
        for prompt in golden.load(demo_model()):
            params = SamplingParams(
                temperature=0.0, max_tokens=len(prompt.token_ids), ignore_eos=True
            )
            output = llm.generate(
                {"prompt_token_ids": prompt.prompt_token_ids}, params, use_tqdm=False
            )
            assert output[0].outputs[0].token_ids == prompt.token_ids, prompt.name


def test_drafts_change_the_steps_and_not_the_text() -> None:
    params = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True)
    texts, steps = [], []
    for nextn in (0, 5):
        with LLM(nextn=nextn, max_model_len=256, batch_invariant=True) as llm:
            texts.append(llm.generate(PROMPT, params, use_tqdm=False)[0].outputs[0])
            steps.append(llm.stats().decode.tokens_per_step)
    assert texts[0].token_ids == texts[1].token_ids
    assert steps[0] == 1.0
    assert steps[1] > 1.5
    assert texts[0].text.isascii()


def test_a_step_planned_behind_accepted_last_drafts_is_empty_and_no_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with LLM(nextn=5, max_model_len=256, max_num_seqs=1, batch_invariant=True) as llm:
        for count in (5, 7, 8, 9, 10, 11):
            params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
            output = llm.generate(PROMPT, params, use_tqdm=False)[0].outputs[0]
            assert len(output.token_ids) == count
    assert not caplog.records


def test_the_command_line_uses_it_by_default(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--prompt", PROMPT, "--max-tokens", "4", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert len(record["token_ids"]) == 4


def test_held_out_text_is_small_and_has_whole_chapters() -> None:
    records = json.loads((DEMO_MODEL / HELD_OUT_FILE).read_text(encoding="utf-8"))
    assert sum(len(record["text"].encode()) for record in records) <= 200_000
    for record in records:
        assert record["text"].startswith(f"{record['name']} ({record['edition']})\n1 ")


def test_a_missing_demo_model_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(assets, "DEMO_MODEL", tmp_path / "none")
    with pytest.raises(CheckpointError, match="demo model is missing from this installation"):
        LLM()
    assert model_or_demo(tmp_path) == tmp_path
