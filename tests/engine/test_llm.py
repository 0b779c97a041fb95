"""The offline interface: what users may ask, what they get, and how it is refused."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from deepinfer_neuron.engine.core import NewRequest
from deepinfer_neuron.errors import ConfigError, RequestError
from deepinfer_neuron.llm import LLM, ChatOptions
from deepinfer_neuron.sampling.params import SamplingParams

CheckpointDir = Callable[..., Path]
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(checkpoint_dir: CheckpointDir) -> Iterator[LLM]:
    with LLM(
        checkpoint_dir("nano"), max_num_seqs=8, max_model_len=512, batch_invariant=True
    ) as engine:
        yield engine


def idle(engine: LLM) -> bool:
    """Nothing is held by anyone."""
    stats = engine.stats()
    return stats.blocks_used == stats.slots_used == stats.waiting == 0


class TestGenerate:
    def test_one_prompt_or_a_list_as_text_or_ids(self, llm: LLM) -> None:
        text = llm.generate("Hello", GREEDY, use_tqdm=False)[0]
        ids = llm.generate({"prompt_token_ids": text.prompt_token_ids}, GREEDY, use_tqdm=False)[0]
        pair = llm.generate(["Hello", {"prompt": "Hello"}], GREEDY, use_tqdm=False)
        assert text.prompt == "Hello"
        assert ids.prompt is None
        assert [item.outputs[0].token_ids for item in pair] == [text.outputs[0].token_ids] * 2
        assert ids.outputs[0].token_ids == text.outputs[0].token_ids

    def test_outputs_keep_the_order_of_the_prompts(self, llm: LLM) -> None:
        prompts = ["a" * n for n in (40, 1, 25, 3)]
        params = [
            SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (1, 9, 3, 5)
        ]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        assert [item.prompt for item in outputs] == prompts
        assert [len(item.outputs[0].token_ids) for item in outputs] == [1, 9, 3, 5]

    def test_no_prompts_give_no_outputs(self, llm: LLM) -> None:
        assert llm.generate([], GREEDY, use_tqdm=False) == []

    def test_n_completions_differ_and_the_first_is_that_of_n_1(self, llm: LLM) -> None:
        def run(n: int) -> list[list[int]]:
            params = SamplingParams(max_tokens=8, n=n, seed=5, ignore_eos=True)
            return [c.token_ids for c in llm.generate("Hi", params, use_tqdm=False)[0].outputs]

        three = run(3)
        assert len({tuple(ids) for ids in three}) == 3
        assert run(1) == three[:1]

    def test_metrics(self, llm: LLM) -> None:
        metrics = llm.generate("Hello", GREEDY, use_tqdm=False)[0].metrics
        assert metrics.num_output_tokens == 6
        assert metrics.ttft is not None
        assert metrics.tpot is not None
        assert metrics.arrival_time < metrics.finish_time

    def test_logprobs_of_tokens_and_prompt(self, llm: LLM) -> None:
        params = SamplingParams(max_tokens=4, logprobs=3, prompt_logprobs=0, ignore_eos=True)
        output = llm.generate("Hello there", params, use_tqdm=False)[0]
        logprobs = output.outputs[0].logprobs
        assert logprobs is not None
        assert [item.token_id for item in logprobs] == output.outputs[0].token_ids
        assert all(len(item.top) == 3 and item.top[0][1] >= item.logprob for item in logprobs)
        assert output.prompt_logprobs is not None
        assert [item.token_id for item in output.prompt_logprobs] == output.prompt_token_ids[1:]
        total = sum(item.logprob for item in logprobs)
        assert output.outputs[0].cumulative_logprob == pytest.approx(total)

    def test_stop_string_and_stop_token(self, llm: LLM) -> None:
        free = llm.generate("Hello", GREEDY, use_tqdm=False)[0].outputs[0]
        token = free.token_ids[2]
        params = SamplingParams(
            temperature=0, max_tokens=6, ignore_eos=True, stop_token_ids=[token]
        )
        stopped = llm.generate("Hello", params, use_tqdm=False)[0].outputs[0]
        first = free.token_ids.index(token)
        assert stopped.token_ids == free.token_ids[: first + 1]
        assert (stopped.finish_reason, stopped.stop_reason) == ("stop", token)
        piece = next(c for c in free.text if c.isascii() and c.isprintable())
        params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, stop=piece)
        stopped = llm.generate("Hello", params, use_tqdm=False)[0].outputs[0]
        assert stopped.text == free.text[: free.text.index(piece)]
        assert (stopped.finish_reason, stopped.stop_reason) == ("stop", piece)

    def test_the_longest_sequence_ends_with_length(self, llm: LLM) -> None:
        ids = [5] * 508
        params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
        output = llm.generate({"prompt_token_ids": ids}, params, use_tqdm=False)[0].outputs[0]
        assert len(output.token_ids) == 4
        assert output.finish_reason == "length"

    @pytest.mark.parametrize(
        ("prompt", "message"),
        [
            ("", "the prompt is empty"),
            ({"prompt_token_ids": []}, "prompt_token_ids is empty"),
            ({"prompt_token_ids": [1, 512]}, r"prompt_token_ids\[1\] is 512"),
            ({"prompt_token_ids": [-1]}, r"prompt_token_ids\[0\] is -1"),
            ({"prompt_token_ids": [True]}, r"prompt_token_ids\[0\] is True"),
            ({"prompt_token_ids": "12"}, "is a str"),
            ({"prompt_token_ids": [1] * 512}, "the prompt has 512 tokens; at most 511"),
            ({"text": "x"}, "a prompt is"),
            ({"prompt": 3}, "is a int"),
            (7, "prompts is a int"),
            ([None], "a prompt is 'None'"),
        ],
    )
    def test_bad_prompts_are_refused_before_anything_runs(
        self, llm: LLM, prompt: Any, message: str
    ) -> None:
        before = llm.stats().steps
        with pytest.raises(RequestError, match=message):
            llm.generate(prompt, GREEDY, use_tqdm=False)
        assert llm.stats().steps == before
        assert idle(llm)

    def test_parameters_must_fit_the_vocabulary(self, llm: LLM) -> None:
        params = SamplingParams(stop_token_ids=[600])
        with pytest.raises(RequestError, match="stop_token_ids names token 600"):
            llm.generate(["a", "b"], [GREEDY, params], use_tqdm=False)
        assert idle(llm)

    def test_parameters_must_match_the_prompts(self, llm: LLM) -> None:
        with pytest.raises(RequestError, match="2 sampling parameters were given for 3 prompts"):
            llm.generate(["a", "b", "c"], [GREEDY, GREEDY], use_tqdm=False)

    def test_an_id_in_use_is_refused(self, llm: LLM) -> None:
        llm.engine.add(NewRequest("twin", [5], GREEDY, 0))
        with pytest.raises(RequestError, match="request id 'twin' is in use"):
            llm.engine.add(NewRequest("twin", [6], GREEDY, 0))
        assert llm.engine.abort("twin")
        assert not llm.engine.abort("twin")
        assert idle(llm)


class TestStream:
    def test_deltas_add_up_to_the_output(self, llm: LLM) -> None:
        whole = llm.generate("Hello", GREEDY, use_tqdm=False)[0].outputs[0]
        deltas = list(llm.stream("Hello", GREEDY))
        assert "".join(delta.text for delta in deltas) == whole.text
        assert [token for delta in deltas for token in delta.token_ids] == whole.token_ids
        assert [delta.finish_reason for delta in deltas[:-1]] == [None] * (len(deltas) - 1)
        assert deltas[-1].finish_reason == "length"

    def test_closing_the_iterator_ends_the_request(self, llm: LLM) -> None:
        aborted = llm.stats().finished.get("abort", 0)
        stream = llm.stream("Hello", SamplingParams(max_tokens=200, ignore_eos=True))
        next(stream)
        stream.close()  # type: ignore[attr-defined]
        assert llm.stats().finished["abort"] == aborted + 1
        assert idle(llm)

    def test_a_stream_that_is_never_read_holds_nothing(self, llm: LLM) -> None:
        llm.stream("Hello", GREEDY).close()  # type: ignore[attr-defined]
        assert idle(llm)
        with pytest.raises(RequestError, match="the prompt is empty"):
            llm.stream("", GREEDY)


class TestChat:
    def test_a_conversation_is_rendered_and_the_answer_parsed(self, llm: LLM) -> None:
        messages = [{"role": "user", "content": "Hi"}]
        (answer,) = llm.chat(messages, GREEDY, use_tqdm=False, options=ChatOptions(thinking=False))
        assert answer.request.prompt == "<｜begin▁of▁sentence｜><｜User｜>Hi<｜Assistant｜></think>"
        assert answer.messages[0].reasoning_content is None
        assert len(answer.request.outputs[0].token_ids) == 6

    def test_bad_messages_are_refused(self, llm: LLM) -> None:
        with pytest.raises(RequestError, match="role"):
            llm.chat([{"role": "nobody", "content": "Hi"}], GREEDY, use_tqdm=False)


class TestTrouble:
    def test_two_threads_share_the_batch(self, llm: LLM) -> None:
        expected = llm.generate(["one", "two"], GREEDY, use_tqdm=False)
        results: dict[str, list[int]] = {}

        def run(prompt: str) -> None:
            output = llm.generate(prompt, GREEDY, use_tqdm=False)[0]
            results[prompt] = output.outputs[0].token_ids

        threads = [threading.Thread(target=run, args=(prompt,)) for prompt in ("one", "two")]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert results == {item.prompt: item.outputs[0].token_ids for item in expected}

    def test_after_an_interrupt_the_engine_works_on(
        self, llm: LLM, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        original, calls = llm.engine.step, []

        def interrupted() -> object:
            calls.append(None)
            if len(calls) == 3:
                raise KeyboardInterrupt
            return original()

        monkeypatch.setattr(llm.engine, "step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(["Hello"] * 4, GREEDY, use_tqdm=False)
        monkeypatch.undo()
        assert idle(llm)
        assert len(llm.generate("Hello", GREEDY, use_tqdm=False)[0].outputs[0].token_ids) == 6

    def test_a_broken_step_ends_its_requests_with_the_cause(
        self, llm: LLM, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        worker = llm.engine.executor.worker

        def broken(_: object) -> object:
            raise MemoryError("no room for the step")

        monkeypatch.setattr(worker, "hidden", broken)
        output = llm.generate("Hello", GREEDY, use_tqdm=False)[0].outputs[0]
        monkeypatch.undo()
        assert output.finish_reason == "error"
        assert "no room for the step" in str(output.stop_reason)
        assert idle(llm)
        assert len(llm.generate("Hello", GREEDY, use_tqdm=False)[0].outputs[0].token_ids) == 6

    def test_a_closed_model_says_so(self, checkpoint_dir: CheckpointDir) -> None:
        closed = LLM(checkpoint_dir("nano"))
        closed.close()
        with pytest.raises(RequestError, match="this LLM is closed"):
            closed.generate("Hello", GREEDY, use_tqdm=False)


class TestLimits:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"max_model_len": 1}, "max_model_len is 1"),
            ({"max_model_len": 10**9}, "the model supports at most"),
            ({"max_num_seqs": 0}, "max_num_seqs is 0"),
            ({"max_num_batched_tokens": 4, "max_num_seqs": 8}, "every running sequence needs"),
            ({"num_blocks": 2, "max_model_len": 512}, "needs 4 blocks"),
            ({"prefill_attempt_interval": 0}, "prefill_attempt_interval is 0"),
            ({"weights": "half"}, "weights is 'half'"),
            ({"dtype": "float16"}, "dtype 'float16' is not supported"),
            ({"seed": -1}, "seed is -1"),
        ],
    )
    def test_impossible_settings_are_refused(
        self, checkpoint_dir: CheckpointDir, options: dict[str, Any], message: str
    ) -> None:
        with pytest.raises(ConfigError, match=message):
            LLM(checkpoint_dir("nano"), **options)


class TestPrefixCache:
    def test_a_hit_changes_nothing_and_is_reported(self, checkpoint_dir: CheckpointDir) -> None:
        prompt = {"prompt_token_ids": [3 + i % 500 for i in range(300)]}
        params = SamplingParams(max_tokens=5, seed=3, logprobs=2, ignore_eos=True)
        with LLM(checkpoint_dir("nano"), batch_invariant=True, max_model_len=512) as engine:
            cold = engine.generate(prompt, params, use_tqdm=False)[0]
            warm = engine.generate(prompt, params, use_tqdm=False)[0]
            rate = engine.stats().prefix_hit_rate
        assert warm.outputs == cold.outputs
        assert cold.metrics.num_cached_tokens == 0
        assert warm.metrics.num_cached_tokens == 256
        assert rate == pytest.approx(256 / 600)

    def test_a_prefix_of_2000_tokens_is_computed_once_for_32_requests(
        self, checkpoint_dir: CheckpointDir
    ) -> None:
        prefix = [3 + (7 * i) % 500 for i in range(1999)]
        prompts = [{"prompt_token_ids": [*prefix, 10 + i]} for i in range(32)]
        params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
        with LLM(checkpoint_dir("nano"), max_model_len=2048, num_blocks=100) as engine:
            outputs = engine.generate(prompts, params, use_tqdm=False)
            stats = engine.stats()
        shared = 2000 // 128 * 128
        assert sorted(item.metrics.num_cached_tokens for item in outputs) == [0] + [shared] * 31
        assert stats.prefill_tokens == 2000 + 31 * (2000 - shared)
