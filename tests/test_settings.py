"""Environment variables become typed settings."""

from __future__ import annotations

import dataclasses

import pytest

from deepinfer_neuron.errors import ConfigError
from deepinfer_neuron.settings import Settings


def test_an_empty_environment_gives_the_defaults() -> None:
    assert Settings.from_env({}) == Settings(batch_invariant=False, weights="auto")


@pytest.mark.parametrize("word", ["0", "", "false", "False"])
def test_a_flag_is_off_for_these_words(word: str) -> None:
    assert Settings.from_env({"DEEPINFER_BATCH_INVARIANT": word}).batch_invariant is False


@pytest.mark.parametrize("word", ["1", "true", "True", "FALSE", "no", " 0"])
def test_a_flag_is_on_for_anything_else(word: str) -> None:
    assert Settings.from_env({"DEEPINFER_BATCH_INVARIANT": word}).batch_invariant is True


@pytest.mark.parametrize("mode", ["auto", "packed", "expanded"])
def test_every_weights_mode_is_read(mode: str) -> None:
    assert Settings.from_env({"DEEPINFER_NEURON_WEIGHTS": mode}).weights == mode


def test_an_empty_weights_mode_means_unset() -> None:
    assert Settings.from_env({"DEEPINFER_NEURON_WEIGHTS": ""}).weights == "auto"


@pytest.mark.parametrize("value", ["Packed", "fp8", "auto "])
def test_a_bad_weights_mode_names_variable_value_and_choices(value: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Settings.from_env({"DEEPINFER_NEURON_WEIGHTS": value})
    message = str(caught.value)
    assert f"DEEPINFER_NEURON_WEIGHTS={value!r}" in message
    assert "auto, packed, expanded" in message


def test_settings_cannot_be_changed() -> None:
    settings = Settings()
    with pytest.raises(dataclasses.FrozenInstanceError):
        settings.weights = "packed"  # type: ignore[misc]
