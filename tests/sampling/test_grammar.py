"""Grammars: what they allow, how they fail, and that a bad one hurts nobody else."""

from __future__ import annotations

import json
import random
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from deepinfer_neuron.errors import RequestError
from deepinfer_neuron.sampling import grammar as grammar_module
from deepinfer_neuron.sampling.grammar import GrammarCompiler, GrammarMatcher, PendingGrammar
from deepinfer_neuron.sampling.structured import StructuredOutput
from deepinfer_neuron.settings import Settings
from deepinfer_neuron.text.tokenizer import Tokenizer
from tests.conftest import OpenCheckpoint

VOCABULARY = 520
"""Wider than the tokenizer's 512, as a padded head would be."""
EOS = 1


@pytest.fixture(scope="module")
def tokenizer(open_checkpoint: OpenCheckpoint) -> Tokenizer:
    checkpoint = open_checkpoint("nano")
    return Tokenizer.load(checkpoint.directory, checkpoint.config)


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer, VOCABULARY, Settings())


def wait(pending: PendingGrammar, seconds: float = 20.0) -> str:
    """The state a pending grammar ends in."""
    deadline = time.monotonic() + seconds
    while pending.poll() == "pending" and time.monotonic() < deadline:
        time.sleep(0.002)
    return pending.poll()


def matcher(compiler: GrammarCompiler, **spec: Any) -> GrammarMatcher:
    pending = compiler.submit(StructuredOutput(**spec))
    assert wait(pending) == "ready", pending.error
    return pending.matcher()


def allowed(following: GrammarMatcher) -> list[int]:
    """Token ids whose bit is set."""
    mask = torch.zeros(-(-VOCABULARY // 32), dtype=torch.int32)
    following.fill_bitmask(mask)
    words = [int(word) & 0xFFFFFFFF for word in mask]
    return [token for token in range(VOCABULARY) if words[token // 32] >> (token % 32) & 1]


def walk(following: GrammarMatcher, rng: random.Random, most: int = 400) -> list[int] | None:
    """Random allowed tokens until the end; ``None`` if it does not come."""
    tokens: list[int] = []
    for _ in range(most):
        choices = allowed(following)
        token = EOS if EOS in choices and rng.random() < 0.5 else rng.choice(choices)
        assert following.accept(token)
        if token == EOS:
            return tokens
        tokens.append(token)
    return None


class TestKinds:
    @pytest.mark.parametrize("pattern", ["[ab]{1,4}", "(yes|no)!", "é+ñ?", "[0-9]{2}-[A-Z]*"])
    def test_regex(self, compiler: GrammarCompiler, tokenizer: Tokenizer, pattern: str) -> None:
        rng = random.Random(1)
        texts = []
        for _ in range(8):
            tokens = walk(matcher(compiler, regex=pattern), rng)
            if tokens is not None:
                texts.append(tokenizer.decode(tokens))
        assert texts
        assert all(re.fullmatch(pattern, text) for text in texts)

    def test_json_schema(self, compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
        schema = {
            "type": "object",
            "properties": {"a": {"enum": ["x", "y"]}, "b": {"type": "boolean"}},
            "required": ["a", "b"],
        }
        for kind in (schema, json.dumps(schema)):
            rng = random.Random(2)
            found = 0
            for _ in range(6):
                tokens = walk(matcher(compiler, json_schema=kind), rng)
                if tokens is not None:
                    value = json.loads(tokenizer.decode(tokens))
                    assert value["a"] in ("x", "y")
                    assert value["b"] in (True, False)
                    found += 1
            assert found

    def test_ebnf_and_structural_tag(self, compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
        tokens = walk(matcher(compiler, grammar='root ::= "x" ("y" | "z")'), random.Random(3))
        assert tokens is not None
        assert tokenizer.decode(tokens) in ("xy", "xz")
        tag = {
            "type": "structural_tag",
            "format": {"type": "const_string", "value": "go"},
        }
        tokens = walk(matcher(compiler, structural_tag=tag), random.Random(4))
        assert tokens is not None
        assert tokenizer.decode(tokens) == "go"

    def test_json_object_starts_with_a_value(self, compiler: GrammarCompiler) -> None:
        following = matcher(compiler, json_object=True)
        assert allowed(following)
        assert EOS not in allowed(following)


class TestMasks:
    def test_only_the_end_is_allowed_when_the_grammar_is_complete(
        self, compiler: GrammarCompiler, tokenizer: Tokenizer
    ) -> None:
        following = matcher(compiler, regex="a")
        (token,) = tokenizer.encode("a", add_bos=False)
        assert allowed(following) == [token]
        assert following.accept(token)
        assert allowed(following) == [EOS]
        assert following.accept(EOS)
        assert following.finished()

    def test_special_and_unknown_ids_are_never_allowed(
        self, compiler: GrammarCompiler, tokenizer: Tokenizer
    ) -> None:
        choices = set(allowed(matcher(compiler, regex="(.|\n)*")))
        assert not choices & set(range(tokenizer.vocab_size, VOCABULARY))
        assert 0 not in choices
        assert 2 not in choices

    def test_a_refused_token_changes_nothing(self, compiler: GrammarCompiler) -> None:
        following = matcher(compiler, regex="[ab]{2}")
        before = allowed(following)
        assert not following.accept(5)
        assert allowed(following) == before

    def test_rollback(self, compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
        following = matcher(compiler, regex="ab?")
        first, second = (tokenizer.encode(text, add_bos=False)[0] for text in "ab")
        masks = [allowed(following)]
        for token in (first, second, EOS, 77):
            assert following.accept(token)
            masks.append(allowed(following))
        for count in (1, 1, 1, 1):
            masks.pop()
            following.rollback(count)
            assert allowed(following) == masks[-1]
        with pytest.raises(ValueError, match="cannot take back 1 tokens"):
            following.rollback(1)


class TestTrigger:
    def test_free_until_the_trigger_with_an_overlapping_prefix(
        self, compiler: GrammarCompiler
    ) -> None:
        following = matcher(compiler, regex="a", trigger_token_ids=[40, 40, 41])
        for token in (7, 40, 40, 40):
            assert following.accept(token)
            assert not following.constrained()
        assert following.accept(41)
        assert following.constrained()

    def test_a_bound_token_forces_the_rest(self, compiler: GrammarCompiler) -> None:
        following = matcher(compiler, regex="a", trigger_token_ids=[40, 41], bound_token_id=99)
        assert following.accept(40)
        assert following.accept(99)
        assert following.constrained()
        assert allowed(following) == [40]
        assert not following.accept(41)
        assert following.accept(40)
        assert allowed(following) == [41]
        assert following.accept(41)
        assert len(allowed(following)) == 1

    def test_rollback_over_the_trigger(self, compiler: GrammarCompiler) -> None:
        following = matcher(compiler, regex="a", trigger_token_ids=[40, 41])
        assert following.accept(40)
        assert following.accept(41)
        following.rollback(1)
        assert not following.constrained()
        assert following.accept(41)
        assert following.constrained()


class TestRefusals:
    @pytest.mark.parametrize(
        ("spec", "reason"),
        [
            ({"regex": "(unclosed"}, "regex was refused: .*parenthesis"),
            ({"grammar": "root := 3"}, "grammar was refused"),
            ({"json_schema": {"type": "nothing"}}, "json_schema was refused"),
            ({"structural_tag": {"type": "?"}}, "structural_tag was refused"),
        ],
    )
    def test_a_wrong_grammar_fails_with_the_reason(
        self, compiler: GrammarCompiler, spec: dict[str, Any], reason: str
    ) -> None:
        pending = compiler.submit(StructuredOutput(**spec))
        assert wait(pending) == "failed"
        assert re.match(reason, pending.error)
        assert wait(compiler.submit(StructuredOutput(regex="ok"))) == "ready"

    @pytest.mark.parametrize(
        ("spec", "message"),
        [
            ({}, "names 0 grammars"),
            ({"regex": "a", "json_object": True}, r"names 2 grammars \(regex, json_object\)"),
            ({"regex": 3}, "regex is a int"),
            ({"json_schema": "{"}, "json_schema is not JSON"),
            ({"json_schema": {"a": {1, 2}}}, "cannot be written as JSON"),
            ({"regex": "a" * 200_000}, "at most 131072 are allowed"),
            ({"regex": "(" * 100 + ")" * 100}, "nests brackets 100 deep"),
            ({"regex": "a{199999}"}, "stands for more than 100000"),
            ({"regex": "((a{100}){100}){100}"}, "stands for more than 100000"),
            ({"grammar": 'root ::= ("ab"{1,9999}){9999}'}, "stands for more than 100000"),
            ({"regex": "a", "trigger_token_ids": [-1]}, "token is -1"),
            ({"regex": "a", "trigger_token_ids": [True]}, "token is True"),
            ({"regex": "a", "bound_token_id": 3}, "needs trigger_token_ids"),
            ({"regex": "a", "trigger_token_ids": 3}, "trigger_token_ids is a int"),
            ({"regex": "[^\0]"}, "holds the character NUL"),
            ({"json_schema": {"pattern": "\0a"}}, "holds the character NUL"),
            ({"json_schema": {"items": {"not": {}}}}, "uses not, which cannot be enforced"),
        ],
    )
    def test_what_is_plainly_wrong_is_refused_at_once(
        self, spec: dict[str, Any], message: str
    ) -> None:
        with pytest.raises(RequestError, match=message):
            StructuredOutput(**spec)

    def test_a_property_may_be_named_like_a_keyword(self) -> None:
        schema = {"type": "object", "properties": {"not": {"enum": [{"if": 1}]}}}
        assert StructuredOutput(json_schema=schema).kind == "json_schema"

    def test_a_grammar_without_any_output_is_refused(self, compiler: GrammarCompiler) -> None:
        pending = compiler.submit(StructuredOutput(grammar="root ::= root"))
        assert wait(pending) == "failed"
        assert "no output can follow it" in pending.error

    def test_a_grammar_that_becomes_costly_fails_its_sequence(
        self, compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        following = matcher(compiler, regex="[ab]*")
        spent = iter(range(0, 1000, 5))
        monkeypatch.setattr(grammar_module.time, "thread_time", lambda: next(spent))
        with pytest.raises(RuntimeError, match="too costly to follow"):
            allowed(following)

    def test_repetitions_side_by_side_do_not_multiply(self) -> None:
        assert StructuredOutput(regex="[0-9]{1,999}-[0-9]{1,999}-(ab){1,999}").kind == "regex"


class TestCompiler:
    def test_a_slow_compilation_times_out_and_others_go_on(
        self, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        compiler = GrammarCompiler(tokenizer, VOCABULARY, Settings(so_builder_cpus=1))
        original: Callable[..., Any] = compiler._compile
        monkeypatch.setattr(grammar_module.time, "monotonic", clock := Clock())

        def slow(spec: StructuredOutput) -> Any:
            while spec.text == "slow" and not clock.released:
                time.sleep(0.001)
            return original(spec)

        monkeypatch.setattr(compiler, "_compile", slow)
        stuck = compiler.submit(StructuredOutput(regex="slow"))
        time.sleep(0.05)
        clock.now += 60
        assert stuck.poll() == "failed"
        assert "did not compile in time" in stuck.error
        other = compiler.submit(StructuredOutput(regex="quick"))
        for _ in range(4000):
            if other.poll() != "pending":
                break
            time.sleep(0.005)
        assert other.poll() == "ready"
        clock.released = True

    def test_equal_grammars_are_compiled_once(
        self, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        compiler = GrammarCompiler(tokenizer, VOCABULARY, Settings())
        count = []
        original: Callable[..., Any] = compiler._compile

        def counted(spec: StructuredOutput) -> Any:
            count.append(spec.text)
            return original(spec)

        monkeypatch.setattr(compiler, "_compile", counted)
        pending = [compiler.submit(StructuredOutput(regex="[ab]+")) for _ in range(5)]
        assert [wait(item) for item in pending] == ["ready"] * 5
        assert wait(compiler.submit(StructuredOutput(regex="[ab]+"))) == "ready"
        assert count == ["[ab]+"]

    def test_the_cache_keeps_what_fits(self, tokenizer: Tokenizer) -> None:
        tiny = GrammarCompiler(tokenizer, VOCABULARY, Settings(xgrammar_cache_limit_bytes=1))
        assert wait(tiny.submit(StructuredOutput(regex="[ab]+"))) == "ready"
        assert not tiny._cache
        off = GrammarCompiler(tokenizer, VOCABULARY, Settings(xgrammar_disable_cache=True))
        assert wait(off.submit(StructuredOutput(regex="[ab]+"))) == "ready"
        assert not off._cache


class Clock:
    """A monotonic clock that a test can move."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.released = False

    def __call__(self) -> float:
        return self.now


def test_text_of_a_grammar_request_follows_it_beside_others(
    checkpoint_dir: Callable[..., Path],
) -> None:
    from deepinfer_neuron.llm import LLM, SamplingParams

    specs = [StructuredOutput(regex="(yes|no)!"), StructuredOutput(regex="(unclosed"), None]
    params = [
        SamplingParams(max_tokens=12, seed=4, structured_output=spec, ignore_eos=spec is None)
        for spec in specs
    ]
    with LLM(checkpoint_dir("nano"), max_model_len=128) as llm:
        outputs = [o.outputs[0] for o in llm.generate(["Hi"] * 3, params, use_tqdm=False)]
        alone = llm.generate("Hi", params[0], use_tqdm=False)[0].outputs[0]
    assert outputs[0].text in ("yes!", "no!")
    assert alone.text in ("yes!", "no!")
    assert outputs[0].finish_reason == "stop"
    assert outputs[1].finish_reason == "error"
    assert "parenthesis" in str(outputs[1].stop_reason)
    assert outputs[1].token_ids == []
    assert len(outputs[2].token_ids) == 12


def test_a_grammar_and_a_stop_string_together(checkpoint_dir: Callable[..., Path]) -> None:
    """Whichever ends the request first: here the text stops inside what the grammar allows."""
    from deepinfer_neuron.llm import LLM, SamplingParams

    params = SamplingParams(
        max_tokens=20, seed=1, stop="b", structured_output=StructuredOutput(regex="a{3}b{3}")
    )
    with LLM(checkpoint_dir("nano"), max_model_len=128) as llm:
        output = llm.generate("Hi", params, use_tqdm=False)[0].outputs[0]
    assert output.text == "aaa"
    assert (output.finish_reason, output.stop_reason) == ("stop", "b")
