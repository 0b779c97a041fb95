"""From tokens to text: one completion as it grows, and when it stops."""

from __future__ import annotations

from deepinfer_neuron.engine.outputs import CompletionOutput, FinishReason, TokenLogprobs
from deepinfer_neuron.sampling.params import SamplingParams
from deepinfer_neuron.sampling.sampler import TokenResult
from deepinfer_neuron.text.detokenizer import IncrementalDetokenizer
from deepinfer_neuron.text.stop_strings import StopStrings
from deepinfer_neuron.text.tokenizer import Tokenizer


class Completion:
    """Text, tokens and log-probabilities of one completion.

    Args:
        index: which of the prompt's completions.
        params: what was asked for.
        tokenizer: decodes tokens.
        eos_token_id: ends the completion unless ignored.
    """

    def __init__(
        self, index: int, params: SamplingParams, tokenizer: Tokenizer, eos_token_id: int
    ) -> None:
        self.index = index
        self.token_ids: list[int] = []
        self.text = ""
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self._params = params
        self._eos = eos_token_id
        self._logprobs: list[TokenLogprobs] = []
        self._detokenizer = IncrementalDetokenizer(
            tokenizer, skip_special_tokens=params.skip_special_tokens
        )
        self._stops = StopStrings(params.stop, include=params.include_stop_str_in_output)

    def push(self, result: TokenResult, limit: int) -> None:
        """Add a token and decide whether the completion ends with it.

        Args:
            result: the token.
            limit: most tokens the completion may have.
        """
        params, token = self._params, result.token_id
        if result.failed is not None:
            self.fail(result.failed)
            return
        self.token_ids.append(token)
        if params.logprobs is not None and result.logprob is not None:
            self._logprobs.append(token_logprobs(result))
        ended: int | None = None
        enough = len(self.token_ids) >= params.min_tokens
        if (token == self._eos and not params.ignore_eos) or token in params.stop_token_ids:
            ended = token if enough else None
        last = ended is not None or len(self.token_ids) >= limit
        self._decode(token, last)
        if self.finish_reason is not None:
            return
        if ended is not None:
            self.finish_reason = "stop"
            self.stop_reason = None if ended == self._eos else ended
        elif last:
            self.finish_reason = "length"

    def fail(self, reason: str) -> None:
        """End with an error; what was generated stays."""
        self._finish_text()
        self.finish_reason, self.stop_reason = "error", reason

    def abort(self) -> None:
        """End because the caller wants no more."""
        self._finish_text()
        self.finish_reason = "abort"

    def output(self) -> CompletionOutput:
        """The completion as it stands."""
        wanted = self._params.logprobs is not None
        return CompletionOutput(
            index=self.index,
            text=self.text,
            token_ids=list(self.token_ids),
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            logprobs=list(self._logprobs) if wanted else None,
            cumulative_logprob=sum(item.logprob for item in self._logprobs) if wanted else None,
        )

    def _decode(self, token: int, last: bool) -> None:
        """Add the token's text, and stop at a stop string once ``min_tokens`` are reached."""
        delta = self._detokenizer.push([token])
        if last:
            delta += self._detokenizer.flush()
        if len(self.token_ids) < self._params.min_tokens:
            self.text += delta
            return
        result = self._stops.push(delta, final=last)
        self.text += result.text
        if result.matched is not None:
            self.finish_reason, self.stop_reason = "stop", result.matched

    def _finish_text(self) -> None:
        self.text += self._stops.push(self._detokenizer.flush(), final=True).text


def token_logprobs(result: TokenResult) -> TokenLogprobs:
    """The log-probabilities of a scored token."""
    logprob = result.logprob if result.logprob is not None else 0.0
    return TokenLogprobs(result.token_id, logprob, result.top, result.sum_smaller_probs)
