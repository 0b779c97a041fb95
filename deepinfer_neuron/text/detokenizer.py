"""Token ids to text, piece by piece, as a request is being generated."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from deepinfer_neuron.text.tokenizer import Tokenizer


class IncrementalDetokenizer:
    """Emits the text of a growing token sequence without ever taking anything back.

    One character may be spread over several tokens. Its bytes are held back until it is complete
    or later bytes show that it is broken; at most three bytes are ever pending, so a push costs
    the same whether it is the tenth or the millionth. All pieces, followed by :meth:`flush`,
    joined give exactly ``Tokenizer.decode`` of all ids, however the ids were split.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        """Reads spellings from ``tokenizer``; special tokens add no text unless asked for."""
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, ids: Sequence[int]) -> str:
        """Appends ids and returns the text that has become certain, possibly "".

        Raises ``TokenizerError`` for an id outside the vocabulary; the state is then unchanged.
        """
        tokenizer = self._tokenizer
        pieces = [
            b"" if self._skip_special_tokens and tokenizer.is_special(i) else piece
            for i, piece in ((i, tokenizer.token_bytes(i)) for i in ids)
        ]
        return self._decoder.decode(b"".join(pieces))

    def flush(self) -> str:
        """Ends the sequence: returns what is pending (U+FFFD for a broken character) or "".

        The object is then ready for another sequence.
        """
        rest = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return rest
