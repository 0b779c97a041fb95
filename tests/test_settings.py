"""Environment variables become typed settings."""

from __future__ import annotations

import dataclasses

import pytest

from deepinfer_neuron.errors import ConfigError
from deepinfer_neuron.settings import Settings


def test_an_empty_environment_gives_the_defaults() -> None:
    assert Settings.from_env({}) == Settings(
        batch_invariant=False,
        weights="auto",
        token_blacklist=(),
        sum_smaller_probs=False,
        force_topk=0,
    )


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


@pytest.mark.parametrize(
    ("value", "tokens"),
    [
        ("", ()),
        ("7", (7,)),
        ("0..3,7,10..12", (0, 1, 2, 3, 7, 10, 11, 12)),
        ("5..5, 6", (5, 6)),
    ],
)
def test_the_token_blacklist_lists_ids_and_closed_ranges(
    value: str, tokens: tuple[int, ...]
) -> None:
    settings = Settings.from_env({"DEEPINFER_DECODE_TOKEN_BLACKLIST": value})
    assert settings.blacklisted_tokens(13) == tokens


@pytest.mark.parametrize(
    "value", [",", "1,", "3..2", "2,2", "2,1", "1..4,4", "-1", "1.5", "1..", "a", "1;2", "1" * 11]
)
def test_a_bad_token_blacklist_names_variable_and_value(value: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Settings.from_env({"DEEPINFER_DECODE_TOKEN_BLACKLIST": value})
    assert f"DEEPINFER_DECODE_TOKEN_BLACKLIST={value!r}" in str(caught.value)


def test_a_blacklist_beyond_the_vocabulary_is_not_expanded() -> None:
    settings = Settings.from_env({"DEEPINFER_DECODE_TOKEN_BLACKLIST": "3,5..9999999999"})
    with pytest.raises(ConfigError, match=r"names token 9999999999; the vocabulary ends at 99"):
        settings.blacklisted_tokens(100)


@pytest.mark.parametrize(("value", "on"), [("", False), ("0", False), ("1", True)])
def test_the_sum_of_smaller_probabilities_is_a_flag(value: str, on: bool) -> None:
    settings = Settings.from_env({"DEEPINFER_COMPUTE_SUM_SMALLER_PROBS": value})
    assert settings.sum_smaller_probs is on


@pytest.mark.parametrize(("value", "count"), [("", 0), ("0", 0), ("1024", 1024)])
def test_the_number_of_forced_leading_logits(value: str, count: int) -> None:
    assert Settings.from_env({"DEEPINFER_SAMPLER_FORCE_TOPK": value}).force_topk == count


@pytest.mark.parametrize("value", ["-1", "1.0", "many"])
def test_a_bad_number_names_variable_and_value(value: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Settings.from_env({"DEEPINFER_SAMPLER_FORCE_TOPK": value})
    assert f"DEEPINFER_SAMPLER_FORCE_TOPK={value!r}" in str(caught.value)


def test_asynchronous_steps_are_on_unless_switched_off() -> None:
    name = "DEEPINFER_ZERO_OVERHEAD_SCHEDULING"
    assert Settings.from_env({}).zero_overhead_scheduling is True
    assert Settings.from_env({name: "0"}).zero_overhead_scheduling is False


def test_engine_and_grammar_numbers() -> None:
    settings = Settings.from_env(
        {
            "DEEPINFER_PREFILL_ATTEMPT_INTERVAL": "70",
            "DEEPINFER_XGRAMMAR_TIMEOUT": "3",
            "DEEPINFER_XGRAMMAR_CACHE_LIMIT_BYTES": "1000",
            "DEEPINFER_XGRAMMAR_DISABLE_CACHE": "1",
            "DEEPINFER_SO_BUILDER_CPUS": "2",
        }
    )
    assert settings.prefill_attempt_interval == 70
    assert settings.xgrammar_timeout == 3
    assert settings.xgrammar_cache_limit_bytes == 1000
    assert settings.xgrammar_disable_cache is True
    assert settings.so_builder_cpus == 2
    assert Settings.from_env({}).xgrammar_timeout == 20
    assert Settings.from_env({}).prefill_attempt_interval == 1


def test_drafts() -> None:
    settings = Settings.from_env(
        {
            "DEEPINFER_USE_NEXTN_DECODE": "3",
            "DEEPINFER_ENABLE_MTP_VARLEN": "1",
            "DEEPINFER_MAX_BACKTRACKING_TOKENS": "9",
            "DEEPINFER_DFLASH_CONFIDENCE_HEAD_TEMPERATURE": "0.5,1,2.5",
            "DEEPINFER_DECODE_PERF_CACHE_DIR": "curves",
            "DEEPINFER_DECODE_PERF_CACHE_TTL_SEC": "60",
        }
    )
    assert settings.nextn == 3
    assert settings.mtp_varlen
    assert settings.backtracking_tokens == 9
    assert settings.confidence_temperatures == (0.5, 1.0, 2.5)
    assert (settings.perf_cache_dir, settings.perf_cache_ttl) == ("curves", 60)
    unset = Settings.from_env({"DEEPINFER_USE_NEXTN_DECODE": ""})
    assert unset.nextn is None
    assert Settings.from_env({"DEEPINFER_USE_NEXTN_DECODE": "0"}).nextn == 0
    assert unset.confidence_temperatures == (1.0,)
    assert not unset.mtp_varlen


@pytest.mark.parametrize("value", ["x", "1,", "0", "-1", "nan", "inf", "1;2"])
def test_a_bad_confidence_temperature_names_variable_and_value(value: str) -> None:
    with pytest.raises(ConfigError, match="CONFIDENCE_HEAD_TEMPERATURE='" + value):
        Settings.from_env({"DEEPINFER_DFLASH_CONFIDENCE_HEAD_TEMPERATURE": value})


def test_settings_cannot_be_changed() -> None:
    settings = Settings()
    with pytest.raises(dataclasses.FrozenInstanceError):
        settings.weights = "packed"  # type: ignore[misc]


def test_the_simulated_device_is_switched_on_by_the_environment() -> None:
    assert not Settings.from_env({}).simulate
    assert Settings.from_env({"DEEPINFER_NEURON_SIMULATE": "1"}).simulate
    assert not Settings.from_env({"DEEPINFER_NEURON_SIMULATE": "0"}).simulate
