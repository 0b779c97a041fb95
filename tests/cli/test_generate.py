"""``generate``: which prompts run, with which parameters, and what is printed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from deepinfer_neuron.cli.generate import collect_prompts
from deepinfer_neuron.cli.main import main
from deepinfer_neuron.engine.config import BucketOptions
from deepinfer_neuron.errors import RequestError


def test_human_output_shows_text_tokens_and_speed(
    engine, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "--model", "m", "--prompt", "two words", "--prompt", "[b]x[/b]"]) == 0
    first, second, rest = capsys.readouterr().out.split("\n\n")
    assert first.splitlines() == [
        "prompt     two words",
        "text       TWO WORDS",
        "token ids  7 8 9",
        "finish     length, 3 tokens",
        # three tokens by 0.25 + 2 * 0.05 seconds
        "speed      TTFT 250.0 ms, TPOT 50.0 ms, 8.6 tokens/s",
        "drafts     1.00 tokens per decode step",
    ]
    assert second.splitlines()[1] == "text       [B]X[/B]"
    assert rest == ""


def test_long_text_is_not_wrapped_and_later_lines_are_indented(
    engine, capsys: pytest.CaptureFixture[str]
) -> None:
    engine.suffix = "\n" + "y" * 500 + "\x1b[2J"
    assert main(["generate", "--model", "m", "--prompt", "p"]) == 0
    assert capsys.readouterr().out.splitlines()[1:3] == [
        "text       P",
        " " * 11 + "y" * 500 + "\\x1b[2J",
    ]


def test_unknown_times_are_dashes(engine, capsys: pytest.CaptureFixture[str]) -> None:
    engine.metrics = type(engine.metrics)(ttft=None, tpot=None)
    assert main(["generate", "--model", "m", "--prompt", "p"]) == 0
    assert "TTFT - ms, TPOT - ms, - tokens/s" in capsys.readouterr().out


def test_json_output_is_one_object_per_prompt_and_nothing_else(
    engine, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "--model", "m", "--prompt", "a b", "--prompt", "c", "--json"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    first, second = (json.loads(line) for line in captured.out.splitlines())
    assert first == {
        "prompt": "a b",
        "prompt_token_ids": [0, 1],
        "text": "A B",
        "token_ids": [7, 8, 9],
        "finish_reason": "length",
        "ttft_ms": 250.0,
        "tpot_ms": 50.0,
        "tokens_per_second": pytest.approx(3 / 0.35),
        "tokens_per_decode_step": 1.0,
    }
    assert second["prompt"] == "c"


def test_defaults_are_greedy(engine) -> None:
    assert main(["generate", "--model", "m", "--prompt", "p"]) == 0
    ((model, options),) = engine.loads
    assert model == "m"
    assert options == {
        "device": "cpu",
        "simulate": None,
        "compile": None,
        "buckets": BucketOptions(),
        "nextn": None,
        "weights": None,
        "max_model_len": None,
        "max_num_seqs": 1,
        "max_num_batched_tokens": None,
        "num_blocks": None,
        "progress": False,
    }
    (params,) = engine.params
    assert (params.temperature, params.max_tokens, params.seed) == (0.0, 32, None)


def test_options_reach_the_engine(engine) -> None:
    options = ["--max-tokens", "5", "--temperature", "0.7", "--seed", "3"]
    options += ["--weights", "packed", "--max-model-len", "128", "--nextn", "3"]
    options += ["--max-num-seqs", "4", "--max-num-batched-tokens", "64", "--num-blocks", "9"]
    options += ["--simulate", "--compile", "regions", "--prefill-bucket", "16"]
    options += ["--context-bucket", "256", "--warm-up-seconds", "2.5"]
    assert main(["generate", "--model", "m", "--prompt", "p", *options]) == 0
    ((model, found),) = engine.loads
    assert model == "m"
    assert found == {
        "device": "neuron",
        "simulate": True,
        "compile": "regions",
        "buckets": BucketOptions(16, 256, 2.5),
        "nextn": 3,
        "weights": "packed",
        "max_model_len": 128,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
        "num_blocks": 9,
        "progress": False,
    }
    (params,) = engine.params
    assert (params.temperature, params.max_tokens, params.seed) == (0.7, 5, 3)


@pytest.mark.parametrize("json_output", [False, True])
def test_a_failed_request_says_why_without_a_traceback(
    json_output: bool, engine, capsys: pytest.CaptureFixture[str]
) -> None:
    engine.failure = "no\nluck"
    options = ["--json"] if json_output else []
    assert main(["generate", "--model", "m", "--prompt", "p", *options]) == 0
    captured = capsys.readouterr()
    assert captured.err == "error: a step failed: ValueError: no luck\n"
    if json_output:
        assert json.loads(captured.out)["error"] == "no\nluck"
    else:
        assert "finish     error, 0 tokens: no" in captured.out


@pytest.mark.parametrize(
    ("prompts", "rows", "together"), [(3, None, 3), (40, None, 32), (3, "2", 2), (1, "0", 1)]
)
def test_no_more_sequences_than_can_run_together(
    prompts: int, rows: str | None, together: int, engine
) -> None:
    options = ["--prompt", "p"] * prompts
    options += [] if rows is None else ["--max-num-batched-tokens", rows]
    assert main(["generate", "--model", "m", *options]) == 0
    assert engine.loads[0][1]["max_num_seqs"] == together


def test_prompts_of_the_file_follow_those_given_directly(tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_bytes("first\r\n\n  \nzweite Zeile ü\u2028same line\n".encode())
    assert collect_prompts(["direct"], str(file)) == [
        "direct",
        "first",
        "zweite Zeile ü\u2028same line",
    ]


def test_no_prompt_is_refused() -> None:
    with pytest.raises(RequestError, match="no prompt; give --prompt"):
        collect_prompts([], None)


def test_an_unreadable_prompt_file_is_named(tmp_path: Path) -> None:
    missing = str(tmp_path / "missing.txt")
    with pytest.raises(RequestError, match=r"missing\.txt"):
        collect_prompts([], missing)
    latin = tmp_path / "latin.txt"
    latin.write_bytes(b"caf\xe9\n")
    with pytest.raises(RequestError, match=r"latin\.txt.*UTF-8"):
        collect_prompts([], str(latin))
