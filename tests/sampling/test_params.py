"""Sampling settings: what is accepted, and what the refusal says."""

from __future__ import annotations

import math

import numpy as np
import pytest

from deepinfer_neuron.errors import RequestError
from deepinfer_neuron.sampling.params import SamplingParams


def test_defaults() -> None:
    params = SamplingParams()
    assert (params.temperature, params.max_tokens) == (1.0, 16)
    assert params.seed is None
    assert params.ignore_eos is False


@pytest.mark.parametrize("temperature", [0, 0.0, -0.0, 5e-324, 1e-5, 1, 0.7, 1e308, np.float64(2)])
def test_temperatures(temperature: float) -> None:
    assert SamplingParams(temperature=temperature).temperature == temperature


@pytest.mark.parametrize(
    "temperature",
    [-1, -1e-9, math.nan, math.inf, -math.inf, True, "1", None, 1j],
)
def test_refused_temperatures(temperature: object) -> None:
    with pytest.raises(RequestError, match=r"temperature is .*finite number of at least 0"):
        SamplingParams(temperature=temperature)  # type: ignore[arg-type]


def test_integers_beyond_any_float_are_refused() -> None:
    with pytest.raises(RequestError, match="temperature is 10"):
        SamplingParams(temperature=10**400)


@pytest.mark.parametrize("count", [1, 2, 2**31 - 1])
def test_numbers_of_tokens(count: int) -> None:
    assert SamplingParams(max_tokens=count).max_tokens == count


@pytest.mark.parametrize("count", [0, -1, 2**31, 1.0, True, "5", None])
def test_refused_numbers_of_tokens(count: object) -> None:
    with pytest.raises(RequestError, match=r"max_tokens is .*an integer from 1 to 2147483647"):
        SamplingParams(max_tokens=count)  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", [None, 0, 1, 2**64 - 1])
def test_seeds(seed: int | None) -> None:
    assert SamplingParams(seed=seed).seed == seed


@pytest.mark.parametrize("seed", [-1, 2**64, 1.0, False, "7"])
def test_refused_seeds(seed: object) -> None:
    with pytest.raises(RequestError, match=r"seed is .*an integer from 0 to 18446744073709551615"):
        SamplingParams(seed=seed)  # type: ignore[arg-type]


@pytest.mark.parametrize("flag", [0, 1, None, "yes"])
def test_refused_flags(flag: object) -> None:
    with pytest.raises(RequestError, match=r"ignore_eos is .*True or False"):
        SamplingParams(ignore_eos=flag)  # type: ignore[arg-type]


def test_the_message_shows_the_value() -> None:
    with pytest.raises(RequestError, match=r"temperature is -0\.5;"):
        SamplingParams(temperature=-0.5)
    with pytest.raises(RequestError, match="max_tokens is 0;"):
        SamplingParams(max_tokens=0)


def test_settings_cannot_change() -> None:
    with pytest.raises(AttributeError):
        SamplingParams().temperature = 0.5  # type: ignore[misc]
