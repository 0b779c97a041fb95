"""What a request may ask of its tokens.

A check takes the name of a parameter and the value that was given, and returns the value to keep.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, get_args

from deepinfer_neuron.errors import RequestError
from deepinfer_neuron.sampling import checks
from deepinfer_neuron.sampling.structured import StructuredOutput

LogprobsMode = Literal["processed", "raw"]
"""``processed``: of the distribution that tokens are drawn from. ``raw``: of the model's own."""

GREEDY_BELOW = 1e-5
"""A temperature below this one decodes greedily; probabilities are then those at 1e-5."""

MAX_LOGPROBS = 1000
"""Most alternatives per token."""

_Check: TypeAlias = Callable[[str, object], object]
_MOST_TOKENS = 2**31 - 1
_MOST_COMPLETIONS = 128
_MOST_STOP_STRINGS = 64
_LONGEST_STOP_STRING = 1024
_MOST_STOP_IDS = 1024
_MOST_BIASES = 1024
_HIGHEST_TEMPERATURE = 1e6


@dataclass(frozen=True, init=False)
class SamplingParams:
    """Sampling settings of one request.

    Attributes:
        temperature: divisor of the logits, 0 to 1e6. Below 1e-5 decoding is greedy: the largest
            logit, the lowest id among equal ones; ``top_p``, ``top_k`` and ``min_p`` are then
            reset to off.
        top_p: keep the most probable tokens until their probabilities exceed this sum, in (0, 1].
        top_k: keep this many of the most probable tokens; -1 keeps all.
        min_p: remove tokens whose probability is below this share of the largest one, in [0, 1].
            It acts before ``top_k`` and ``top_p``.
        max_tokens: most tokens to generate, 1 to 2^31 - 1.
        min_tokens: end-of-sequence and stop tokens are impossible before this many tokens.
        stop: texts that end the generation; one string or several.
        stop_token_ids: token ids that end the generation, besides the end-of-sequence token.
        include_stop_str_in_output: keep the stop text at the end of the output.
        ignore_eos: keep going after the end-of-sequence token.
        seed: seed of the draws, any integer, reduced modulo 2^64; ``None`` lets the engine choose.
            Requests with equal seeds and equal prompts give equal tokens.
        n: completions of the prompt, 1 to 128; see
            :func:`~deepinfer_neuron.sampling.state.completion_seed`.
        logprobs: log-probability of every generated token: ``None`` for none, 0 for the token's
            own, k for the k most probable ones too.
        prompt_logprobs: the same for the tokens of the prompt. Penalties, biases and masks do not
            act on them.
        logprobs_mode: ``"processed"`` (after masks, penalties, temperature and filters) or
            ``"raw"`` (log-softmax of the model's logits).
        presence_penalty: subtracted from the logit of every token generated before, -2 to 2.
        frequency_penalty: subtracted once per earlier generation of the token, -2 to 2.
        repetition_penalty: positive logits of tokens in the prompt or the output are divided by
            this factor and the others multiplied, 0.01 to 100.
        logit_bias: added to the logits of these token ids, each from -100 to 100.
        first_n_token_no_eos: 1 makes the end-of-sequence token impossible as the first generated
            token; other values have no effect.
        golden_token_ids: forced output: the token at this place of the list, whatever the
            distribution says, or a free choice where it holds -1 and behind its end.
        structured_output: grammar that the output has to follow.
        skip_special_tokens: leave special tokens out of the text.

    Raises:
        RequestError: a value outside its range, or settings that contradict each other.
    """

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    max_tokens: int
    min_tokens: int
    stop: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    include_stop_str_in_output: bool
    ignore_eos: bool
    seed: int | None
    n: int
    logprobs: int | None
    prompt_logprobs: int | None
    logprobs_mode: LogprobsMode
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: Mapping[int, float] = field(hash=False)
    first_n_token_no_eos: int
    golden_token_ids: tuple[int, ...]
    structured_output: StructuredOutput | None
    skip_special_tokens: bool

    def __init__(
        self,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = -1,
        min_p: float = 0.0,
        max_tokens: int = 16,
        min_tokens: int = 0,
        stop: str | Iterable[str] | None = None,
        stop_token_ids: Iterable[int] | None = None,
        include_stop_str_in_output: bool = False,
        ignore_eos: bool = False,
        seed: int | None = None,
        n: int = 1,
        logprobs: int | None = None,
        prompt_logprobs: int | None = None,
        logprobs_mode: LogprobsMode = "processed",
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
        repetition_penalty: float = 1.0,
        logit_bias: Mapping[int, float] | None = None,
        first_n_token_no_eos: int = 0,
        golden_token_ids: Sequence[int] | None = None,
        structured_output: StructuredOutput | None = None,
        skip_special_tokens: bool = True,
    ) -> None:
        given: dict[str, object] = {
            "temperature": temperature,
            "top_p": top_p,
            "top_k": top_k,
            "min_p": min_p,
            "max_tokens": max_tokens,
            "min_tokens": min_tokens,
            "stop": stop,
            "stop_token_ids": stop_token_ids,
            "include_stop_str_in_output": include_stop_str_in_output,
            "ignore_eos": ignore_eos,
            "seed": seed,
            "n": n,
            "logprobs": logprobs,
            "prompt_logprobs": prompt_logprobs,
            "logprobs_mode": logprobs_mode,
            "presence_penalty": presence_penalty,
            "frequency_penalty": frequency_penalty,
            "repetition_penalty": repetition_penalty,
            "logit_bias": logit_bias,
            "first_n_token_no_eos": first_n_token_no_eos,
            "golden_token_ids": golden_token_ids,
            "structured_output": structured_output,
            "skip_special_tokens": skip_special_tokens,
        }
        for name, value in given.items():
            object.__setattr__(self, name, _CHECKS[name](name, value))
        if self.is_greedy:
            for name, off in _GREEDY.items():
                object.__setattr__(self, name, off)
        self._refuse_contradictions()

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> SamplingParams:
        """Parameters by name; a value of ``None`` means the default.

        Raises:
            RequestError: an unknown name, or a value that the constructor refuses.
        """
        known = {place.name for place in dataclasses.fields(cls)}
        unknown = [str(name) for name in values if name not in known]
        if unknown:
            raise RequestError(
                f"unknown sampling parameters: {', '.join(unknown)}; known are "
                f"{', '.join(sorted(known))}"
            )
        return cls(**{name: value for name, value in values.items() if value is not None})

    @property
    def is_greedy(self) -> bool:
        """Whether the largest logit is taken instead of a draw."""
        return self.temperature < GREEDY_BELOW

    @property
    def has_penalties(self) -> bool:
        """Whether earlier tokens change the logits."""
        return (
            self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
            or self.repetition_penalty != 1.0
        )

    def check_vocabulary(self, vocab_size: int) -> None:
        """See that every token id exists.

        Raises:
            RequestError: an id of ``stop_token_ids``, ``logit_bias``, ``golden_token_ids`` or of
                the structured output is not below ``vocab_size``.
        """
        named: dict[str, Iterable[int]] = {
            "stop_token_ids": self.stop_token_ids,
            "logit_bias": self.logit_bias,
            "golden_token_ids": self.golden_token_ids,
        }
        if self.structured_output is not None:
            named["trigger_token_ids"] = self.structured_output.trigger_token_ids
            named["bound_token_id"] = (self.structured_output.bound_token_id or 0,)
        for name, ids in named.items():
            largest = max(ids, default=-1)
            if largest >= vocab_size:
                raise RequestError(
                    f"{name} names token {largest}; the vocabulary ends at {vocab_size - 1}"
                )

    def _refuse_contradictions(self) -> None:
        if self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens is {self.min_tokens} and max_tokens {self.max_tokens}; give a "
                "min_tokens that is not above max_tokens"
            )
        if self.golden_token_ids and self.structured_output is not None:
            raise RequestError(
                "golden_token_ids and structured_output are both given; forced tokens cannot also "
                "follow a grammar, leave one of them out"
            )


_GREEDY: Mapping[str, object] = {"top_p": 1.0, "top_k": -1, "min_p": 0.0}


def _number_in(low: float, high: float) -> _Check:
    return lambda name, value: float(checks.number(name, value, low, high))


def _integer_in(low: int, high: int) -> _Check:
    return lambda name, value: checks.integer(name, value, low, high)


def _optional_count(name: str, value: object) -> object:
    return None if value is None else checks.integer(name, value, 0, MAX_LOGPROBS, hint=" or None")


def _ids_of(low: int, most: int) -> _Check:
    return lambda name, value: () if value is None else checks.token_ids(name, value, low, most)


def _top_p(name: str, value: object) -> object:
    share = float(checks.number(name, value, 0.0, 1.0))
    if share == 0.0:
        raise RequestError(f"{name} is {value!r}; give a number above 0 and at most 1")
    return share


def _top_k(name: str, value: object) -> object:
    if value == -1 and not isinstance(value, bool):
        return -1
    return checks.integer(name, value, 1, _MOST_TOKENS, hint=", or -1 to keep all tokens")


def _stop(name: str, value: object) -> object:
    if value is None:
        return ()
    return checks.strings(name, value, _MOST_STOP_STRINGS, _LONGEST_STOP_STRING)


def _bias(name: str, value: object) -> object:
    return {} if value is None else checks.token_numbers(name, value, -100.0, 100.0, _MOST_BIASES)


def _seed(name: str, value: object) -> object:
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool):
        raise RequestError(f"{name} is {value!r}; give an integer or None")
    return value % 2**64


def _structured(name: str, value: object) -> object:
    if value is None:
        return None
    if not isinstance(value, StructuredOutput):
        raise RequestError(f"{name} is a {type(value).__name__}; give a StructuredOutput or None")
    return value


def _mode(name: str, value: object) -> object:
    return checks.choice(name, value, get_args(LogprobsMode))


_CHECKS: Mapping[str, _Check] = {
    "temperature": _number_in(0.0, _HIGHEST_TEMPERATURE),
    "top_p": _top_p,
    "top_k": _top_k,
    "min_p": _number_in(0.0, 1.0),
    "max_tokens": _integer_in(1, _MOST_TOKENS),
    "min_tokens": _integer_in(0, _MOST_TOKENS),
    "stop": _stop,
    "stop_token_ids": _ids_of(0, _MOST_STOP_IDS),
    "include_stop_str_in_output": checks.flag,
    "ignore_eos": checks.flag,
    "seed": _seed,
    "n": _integer_in(1, _MOST_COMPLETIONS),
    "logprobs": _optional_count,
    "prompt_logprobs": _optional_count,
    "logprobs_mode": _mode,
    "presence_penalty": _number_in(-2.0, 2.0),
    "frequency_penalty": _number_in(-2.0, 2.0),
    "repetition_penalty": _number_in(0.01, 100.0),
    "logit_bias": _bias,
    "first_n_token_no_eos": _integer_in(0, _MOST_TOKENS),
    "golden_token_ids": _ids_of(-1, _MOST_TOKENS),
    "structured_output": _structured,
    "skip_special_tokens": checks.flag,
}
