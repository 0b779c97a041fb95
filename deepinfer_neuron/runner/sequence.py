"""What the executor knows of a sequence. Only the executor touches it once it is admitted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from deepinfer_neuron.sampling.drafts import Draft
from deepinfer_neuron.sampling.params import SamplingParams
from deepinfer_neuron.sampling.sampler import TokenResult
from deepinfer_neuron.sampling.state import SamplingState

_ROOM = 64

_Number = TypeVar("_Number", np.int32, np.int64)


class SequenceData:
    """Tokens and sampling state of one sequence.

    Args:
        prompt_token_ids: the prompt.
        compressed: its compressed ids, int32 ``[prompt]``.
        params: what the request asked for.
        state: sampling state, advanced with every token.
        max_length: most tokens, prompt included, that it may reach.
    """

    def __init__(
        self,
        prompt_token_ids: list[int],
        compressed: NDArray[np.int32],
        params: SamplingParams,
        state: SamplingState,
        max_length: int,
    ) -> None:
        self.params = params
        self.state = state
        self.max_length = max_length
        self.drafts: tuple[Draft, ...] = ()
        """Proposals for the tokens behind the last one."""
        self.num_prompt_tokens = len(prompt_token_ids)
        self.prompt_results: list[TokenResult] = []
        """Scores of prompt tokens 1, 2, … as far as they are known."""
        self._length = len(prompt_token_ids)
        self._tokens = _with_room(np.asarray(prompt_token_ids, dtype=np.int64))
        self._compressed = _with_room(compressed)

    def __len__(self) -> int:
        return self._length

    @property
    def scores_prompt(self) -> bool:
        """Whether scores of prompt tokens are wanted and not all known yet."""
        wanted = self.params.prompt_logprobs is not None
        return wanted and len(self.prompt_results) < self.num_prompt_tokens - 1

    @property
    def room_for_drafts(self) -> int:
        """Drafts that could become tokens: one token follows them in any case."""
        return max(0, self.max_length - self._length - 1)

    def tokens(self, begin: int, end: int) -> NDArray[np.int64]:
        """Tokens at positions ``[begin, end)``, proposed ones behind the last."""
        return self._tokens[begin:end]

    def compressed(self, end: int) -> NDArray[np.int32]:
        """Compressed ids at positions ``[0, end)``, proposed ones behind the last."""
        return self._compressed[:end]

    def append(self, token: int, compressed: int) -> None:
        """Add a token and its compressed id."""
        self._reserve(1)
        self._tokens[self._length] = token
        self._compressed[self._length] = compressed
        self._length += 1

    def propose(self, drafts: Sequence[Draft], compressed: NDArray[np.int32]) -> None:
        """Replace the drafts, at most as many as there is room for, with their compressed ids."""
        self._reserve(len(drafts))
        stop = self._length + len(drafts)
        self._tokens[self._length : stop] = [draft.token_id for draft in drafts]
        self._compressed[self._length : stop] = compressed
        self.drafts = tuple(drafts)

    def _reserve(self, count: int) -> None:
        if self._length + count > len(self._tokens):
            self._tokens = _with_room(self._tokens)
            self._compressed = _with_room(self._compressed)


def _with_room(values: NDArray[_Number]) -> NDArray[_Number]:
    """A copy with space for as many elements again."""
    return np.concatenate((values, np.zeros(max(_ROOM, len(values)), dtype=values.dtype)))
