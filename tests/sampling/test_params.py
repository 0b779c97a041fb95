"""Sampling parameters: defaults, ranges, normalisation, contradictions."""

from __future__ import annotations

import copy
import dataclasses
import math
from typing import Any

import pytest

from deepinfer_neuron.errors import RequestError
from deepinfer_neuron.sampling.params import SamplingParams
from deepinfer_neuron.sampling.structured import StructuredOutput

DEFAULTS: dict[str, object] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "max_tokens": 16,
    "min_tokens": 0,
    "stop": (),
    "stop_token_ids": (),
    "include_stop_str_in_output": False,
    "ignore_eos": False,
    "seed": None,
    "n": 1,
    "logprobs": None,
    "prompt_logprobs": None,
    "logprobs_mode": "processed",
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "logit_bias": {},
    "first_n_token_no_eos": 0,
    "golden_token_ids": (),
    "structured_output": None,
    "skip_special_tokens": True,
}


def test_defaults() -> None:
    params = SamplingParams()
    assert {f.name: getattr(params, f.name) for f in dataclasses.fields(params)} == DEFAULTS


@pytest.mark.parametrize("temperature", [0, 0.0, 9e-6])
def test_a_greedy_request_switches_the_filters_off(temperature: float) -> None:
    params = SamplingParams(temperature=temperature, top_p=0.5, top_k=3, min_p=0.2)
    assert params.is_greedy
    assert (params.top_p, params.top_k, params.min_p) == (1.0, -1, 0.0)


def test_the_lowest_temperature_that_draws_keeps_its_filters() -> None:
    params = SamplingParams(temperature=1e-5, top_p=0.5, top_k=3, min_p=0.2)
    assert not params.is_greedy
    assert (params.top_p, params.top_k, params.min_p) == (0.5, 3, 0.2)


@pytest.mark.parametrize(
    ("given", "kept"), [(-1, 2**64 - 1), (2**64, 0), (2**64 + 7, 7), (5, 5), (None, None)]
)
def test_a_seed_is_reduced_to_64_bits(given: int | None, kept: int | None) -> None:
    assert SamplingParams(seed=given).seed == kept


def test_lists_become_tuples() -> None:
    params = SamplingParams(
        stop=["b", "a", "b"],
        stop_token_ids=[5, 4],
        golden_token_ids=[-1, 3],
        logit_bias={9: 1, 2: -3},
    )
    assert params.stop == ("b", "a")
    assert params.stop_token_ids == (5, 4)
    assert params.golden_token_ids == (-1, 3)
    assert list(params.logit_bias.items()) == [(2, -3.0), (9, 1.0)]
    assert SamplingParams(stop="end").stop == ("end",)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("temperature", [-0.1, math.nan, math.inf, 2e6, "1", True, None]),
        ("top_p", [0, 0.0, -0.5, 1.0001, math.nan, None]),
        ("top_k", [0, -2, 2**31, 1.0, True, -0.5]),
        ("min_p", [-0.1, 1.1, math.nan]),
        ("max_tokens", [0, -1, 2**31, 1.5, True, None]),
        ("min_tokens", [-1, 1.0]),
        ("stop", [[""], "", [3], 3, {"a": 1}, ["x"] * 2 + [None], "x" * 2000]),
        ("stop_token_ids", ["12", [-1], [True], [1.0], 7, [0] * 2000]),
        ("include_stop_str_in_output", [1, None]),
        ("ignore_eos", [0, None]),
        ("seed", [1.0, "1", True]),
        ("n", [0, 129, 1.0]),
        ("logprobs", [-1, 1001, True, 1.0]),
        ("prompt_logprobs", [-1, 1001, True]),
        ("logprobs_mode", ["both", None]),
        ("presence_penalty", [-2.1, 2.1, math.nan]),
        ("frequency_penalty", [-2.1, 2.1]),
        ("repetition_penalty", [0, -1, 101]),
        ("logit_bias", [[1], {-1: 0.0}, {"1": 0.0}, {1: 101.0}, {1: math.inf}, {1: None}]),
        ("first_n_token_no_eos", [-1, True]),
        ("golden_token_ids", [[-2], [None], "ab"]),
        ("skip_special_tokens", [1]),
    ],
)
def test_refusals_name_the_parameter(name: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(RequestError, match=name):
            SamplingParams(**{name: value})


def test_too_many_stop_strings() -> None:
    with pytest.raises(RequestError, match=r"stop has 65 entries; give at most 64"):
        SamplingParams(stop=[str(i) for i in range(65)])


def test_more_forced_than_allowed_tokens_are_fine_but_not_more_required_ones() -> None:
    SamplingParams(max_tokens=2, golden_token_ids=[1, 2, 3])
    with pytest.raises(RequestError, match=r"min_tokens is 3 and max_tokens 2"):
        SamplingParams(min_tokens=3, max_tokens=2)


def test_a_grammar_is_typed_and_excludes_forced_tokens() -> None:
    grammar = StructuredOutput(regex="a+")
    assert SamplingParams(structured_output=grammar).structured_output is grammar
    with pytest.raises(RequestError, match=r"golden_token_ids and structured_output are both"):
        SamplingParams(structured_output=grammar, golden_token_ids=[1])
    with pytest.raises(RequestError, match=r"structured_output is a dict; give a Structured"):
        SamplingParams.from_mapping({"structured_output": {"regex": "a+"}})


def test_names_and_none_values_of_a_mapping() -> None:
    params = SamplingParams.from_mapping({"temperature": 0.5, "top_p": None, "seed": 3})
    assert params == SamplingParams(temperature=0.5, seed=3)
    with pytest.raises(RequestError, match=r"unknown sampling parameters: best_of; known are"):
        SamplingParams.from_mapping({"best_of": 2})


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(stop_token_ids=[100]),
        SamplingParams(logit_bias={100: 1.0}),
        SamplingParams(golden_token_ids=[3, 100]),
    ],
)
def test_token_ids_are_checked_against_a_vocabulary(params: SamplingParams) -> None:
    params.check_vocabulary(101)
    with pytest.raises(RequestError, match=r"names token 100; the vocabulary ends at 99"):
        params.check_vocabulary(100)


def test_parameters_are_values() -> None:
    params = SamplingParams(temperature=0.5, seed=1, logit_bias={1: 2.0})
    assert copy.deepcopy(params) == params
    assert dataclasses.replace(params, seed=2) == SamplingParams(
        temperature=0.5, seed=2, logit_bias={1: 2.0}
    )
    assert hash(params) == hash(copy.deepcopy(params))
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.seed = 3  # type: ignore[misc]
