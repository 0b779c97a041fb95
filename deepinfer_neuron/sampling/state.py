"""What a sequence remembers between its draws."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from deepinfer_neuron.ops.philox import philox
from deepinfer_neuron.sampling.params import GREEDY_BELOW, SamplingParams
from deepinfer_neuron.sampling.penalties import TokenCounts


class Matcher(Protocol):
    """A grammar that follows one sequence."""

    def constrained(self) -> bool:
        """Whether the grammar restricts the next token."""

    def accept(self, token: int) -> bool:
        """Advance by a token; ``False`` if the grammar refuses it."""

    def rollback(self, count: int) -> None:
        """Take back the last ``count`` accepted tokens."""

    def fill_bitmask(self, bitmask: Tensor) -> None:
        """Write the allowed next tokens into int32 ``[ceil(V / 32)]``.

        Bit ``j % 32`` of word ``j // 32`` becomes 1 for an allowed token ``j``.
        """


class SamplingState:
    """Everything about one sequence that choosing its next token needs.

    Only the sampler touches it, so the scheduler may plan the next step meanwhile.

    Attributes:
        params: of the request.
        seed: of this completion, in [0, 2^64).
        temperature: divisor of the logits, at least 1e-5.
        eos_token_id: end-of-sequence token.
        vocab_size: width of the logits.
        matcher: grammar of the output, or ``None``.
        counts: earlier tokens, or ``None`` if no penalty is set.
        bias: token ids int64 ``[k]`` and fp32 ``[k]``, or ``None``.
        num_output_tokens: tokens accepted so far.
        failure: why no further token can be chosen, or ``None``.
    """

    def __init__(
        self,
        params: SamplingParams,
        seed: int,
        prompt_token_ids: Sequence[int],
        eos_token_id: int,
        vocab_size: int,
        matcher: Matcher | None = None,
    ) -> None:
        """Start a sequence.

        Args:
            params: of the request.
            seed: of this completion, in [0, 2^64); see :func:`completion_seed`.
            prompt_token_ids: for the repetition penalty; ids outside the vocabulary (places of an
                image) are passed over.
            eos_token_id: end-of-sequence token.
            vocab_size: width of the logits.
            matcher: a fresh grammar matcher.

        Raises:
            RequestError: the parameters name a token outside the vocabulary.
        """
        params.check_vocabulary(vocab_size)
        self.params = params
        self.seed = seed
        self.temperature = max(params.temperature, GREEDY_BELOW)
        self.eos_token_id = eos_token_id
        self.vocab_size = vocab_size
        self.matcher = matcher
        self.num_output_tokens = 0
        self.failure: str | None = None
        self.counts: TokenCounts | None = None
        if params.has_penalties:
            repeated = prompt_token_ids if params.repetition_penalty != 1.0 else ()
            self.counts = TokenCounts(token for token in repeated if 0 <= token < vocab_size)
        self.bias: tuple[Tensor, Tensor] | None = None
        if params.logit_bias:
            ids, amounts = zip(*params.logit_bias.items(), strict=True)
            self.bias = torch.tensor(ids), torch.tensor(amounts, dtype=torch.float32)

    @property
    def forced_token(self) -> int | None:
        """The token that the request prescribes for the next place, if any."""
        golden = self.params.golden_token_ids
        place = self.num_output_tokens
        return golden[place] if place < len(golden) and golden[place] >= 0 else None

    def excluded_tokens(self) -> tuple[int, ...]:
        """Tokens that cannot be the next one, because the sequence may not end yet."""
        params = self.params
        if self.num_output_tokens < params.min_tokens:
            return (self.eos_token_id, *params.stop_token_ids)
        if self.num_output_tokens == 0 and params.first_n_token_no_eos == 1:
            return (self.eos_token_id,)
        return ()

    def ends_with(self, token: int) -> bool:
        """Whether the sequence ends with a token that was just accepted."""
        params = self.params
        if self.num_output_tokens < params.min_tokens:
            return False
        ended = token == self.eos_token_id and not params.ignore_eos
        return ended or token in params.stop_token_ids

    def accept(self, token: int) -> None:
        """Take note of an emitted token; sets ``failure`` if the grammar refuses it."""
        if self.matcher is not None:
            try:
                if not self.matcher.accept(token):
                    self.failure = f"the grammar refused token {token}"
            except Exception as error:
                self.failure = f"the grammar failed: {error}"
            if self.failure is not None:
                return
        self.num_output_tokens += 1
        if self.counts is not None:
            self.counts.add(token)


def completion_seed(seed: int, index: int) -> int:
    """Seed of one of the ``n`` completions of a request.

    The first completion keeps the seed of the request, so that ``n`` does not change it. The
    others take the first two words that the generator gives for the key ``seed`` and the counter
    ``(index, 1, 0, 0)``, which no draw of a token uses.

    Args:
        seed: of the request, in [0, 2^64).
        index: of the completion, from 0.

    Returns:
        a seed in [0, 2^64).
    """
    if index == 0:
        return seed
    key = torch.tensor([seed & 0xFFFFFFFF, seed >> 32])
    low, high, _, _ = philox(torch.tensor([index, 1, 0, 0]), key).tolist()
    return int(low | (high << 32))
