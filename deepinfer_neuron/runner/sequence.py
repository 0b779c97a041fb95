"""What the executor knows of a sequence. Only the executor touches it once it is admitted."""

from __future__ import annotations

from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

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
    """

    def __init__(
        self,
        prompt_token_ids: list[int],
        compressed: NDArray[np.int32],
        params: SamplingParams,
        state: SamplingState,
    ) -> None:
        self.params = params
        self.state = state
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

    def tokens(self, begin: int, end: int) -> NDArray[np.int64]:
        """Tokens at positions ``[begin, end)``."""
        return self._tokens[begin:end]

    def compressed(self, end: int) -> NDArray[np.int32]:
        """Compressed ids at positions ``[0, end)``."""
        return self._compressed[:end]

    def append(self, token: int, compressed: int) -> None:
        """Add a token and its compressed id."""
        if self._length == len(self._tokens):
            self._tokens = _with_room(self._tokens)
            self._compressed = _with_room(self._compressed)
        self._tokens[self._length] = token
        self._compressed[self._length] = compressed
        self._length += 1


def _with_room(values: NDArray[_Number]) -> NDArray[_Number]:
    """A copy with space for as many elements again."""
    return np.concatenate((values, np.zeros(max(_ROOM, len(values)), dtype=values.dtype)))
