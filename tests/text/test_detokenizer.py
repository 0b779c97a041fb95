"""Incremental detokenization: pieces that never have to be taken back."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_neuron.errors import TokenizerError
from deepinfer_neuron.text import IncrementalDetokenizer, Tokenizer
from tests.support import small_tokenizer
from tests.support.small_tokenizer import FIRST_BYTE_ID, HOLDER, SIZE, THINK, ModelStub, token_id

ANY_ID = st.integers(0, SIZE - 1)
SMILEY = "😀"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """The small tokenizer; ids 3 to 258 are the bytes in order."""
    directory: Path = small_tokenizer.write_tokenizer(tmp_path_factory.mktemp("small"))
    return Tokenizer.load(directory, ModelStub())


def byte_ids(data: bytes) -> list[int]:
    """One id per byte."""
    return [FIRST_BYTE_ID + byte for byte in data]


def deltas(detokenizer: IncrementalDetokenizer, chunks: list[list[int]]) -> list[str]:
    """What each chunk adds, and the rest at the end."""
    return [*(detokenizer.push(chunk) for chunk in chunks), detokenizer.flush()]


class TestPush:
    """When text becomes certain."""

    def test_a_character_appears_with_its_last_byte(self, tokenizer: Tokenizer) -> None:
        one_by_one = [[number] for number in byte_ids(f"a{SMILEY}b".encode())]
        got = deltas(IncrementalDetokenizer(tokenizer), one_by_one)
        assert got == ["a", "", "", "", SMILEY, "b", ""]

    def test_merged_pieces(self, tokenizer: Tokenizer) -> None:
        chunks = [[token_id("ðŁĺ")], byte_ids(b"\x80"), [token_id("ä½ł"), token_id("ä½")]]
        got = deltas(IncrementalDetokenizer(tokenizer), chunks)
        assert got == ["", SMILEY, "你", "\ufffd"]

    def test_a_broken_character_appears_as_soon_as_it_is_broken(self, tokenizer: Tokenizer) -> None:
        detokenizer = IncrementalDetokenizer(tokenizer)
        assert detokenizer.push(byte_ids(b"\xf0\x9f")) == ""
        assert detokenizer.push(byte_ids(b"a")) == "\ufffda"
        assert detokenizer.push(byte_ids(b"\xff")) == "\ufffd"
        assert detokenizer.flush() == ""

    def test_the_replacement_character_itself(self, tokenizer: Tokenizer) -> None:
        got = deltas(IncrementalDetokenizer(tokenizer), [byte_ids("\ufffd".encode()), []])
        assert got == ["\ufffd", "", ""]

    def test_skipped_tokens_do_not_break_a_character(self, tokenizer: Tokenizer) -> None:
        """Decoding all ids at once drops them before joining bytes, and so must this."""
        head, tail = byte_ids(SMILEY.encode())[:2], byte_ids(SMILEY.encode())[2:]
        ids = [*head, token_id(HOLDER), *tail, 1]
        assert deltas(IncrementalDetokenizer(tokenizer), [[i] for i in ids])[4] == SMILEY
        assert tokenizer.decode(ids) == SMILEY

    def test_visible_tokens_do(self, tokenizer: Tokenizer) -> None:
        head, tail = byte_ids(SMILEY.encode())[:2], byte_ids(SMILEY.encode())[2:]
        got = deltas(IncrementalDetokenizer(tokenizer), [head, [token_id(THINK)], tail])
        assert "".join(got) == "\ufffd<think>\ufffd\ufffd"

    def test_special_tokens_on_request(self, tokenizer: Tokenizer) -> None:
        detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=False)
        assert detokenizer.push([1, token_id("the")]) == f"{small_tokenizer.EOS}the"

    def test_flush_prepares_for_another_text(self, tokenizer: Tokenizer) -> None:
        detokenizer = IncrementalDetokenizer(tokenizer)
        detokenizer.push(byte_ids(b"\xf0\x9f"))
        assert detokenizer.flush() == "\ufffd"
        assert detokenizer.push(byte_ids(b"\x98ok")) == "\ufffdok"

    def test_a_bad_id_changes_nothing(self, tokenizer: Tokenizer) -> None:
        detokenizer = IncrementalDetokenizer(tokenizer)
        detokenizer.push(byte_ids(b"\xc3"))
        with pytest.raises(TokenizerError, match="id 300 is outside"):
            detokenizer.push([*byte_ids(b"xyz"), 300])
        assert detokenizer.push(byte_ids(b"\xa9")) == "é"


@settings(deadline=None, derandomize=True, max_examples=300)
@given(chunks=st.lists(st.lists(ANY_ID, max_size=6), max_size=12), skip=st.booleans())
def test_pieces_of_random_ids_join_to_the_decoded_text(
    tokenizer: Tokenizer, chunks: list[list[int]], skip: bool
) -> None:
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip)
    ids = list(itertools.chain.from_iterable(chunks))
    expected = tokenizer.decode(ids, skip_special_tokens=skip)
    assert "".join(deltas(detokenizer, chunks)) == expected


# Leading, continuation and never valid bytes, so that random sequences are often nearly valid.
TRICKY = bytes.fromhex("7f8090a0bfc0c2c3dfe0e1edeff0f1f4f5ff")


@settings(deadline=None, derandomize=True, max_examples=300)
@given(data=st.lists(st.sampled_from(list(TRICKY)), max_size=30))
def test_nearly_valid_bytes(tokenizer: Tokenizer, data: list[int]) -> None:
    """Also at each moment: what is out is final, and at most three bytes are held back."""
    detokenizer = IncrementalDetokenizer(tokenizer)
    ids = byte_ids(bytes(data))
    final = tokenizer.decode(ids)
    out = ""
    for count, number in enumerate(ids, start=1):
        out += detokenizer.push([number])
        assert final.startswith(out)
        assert out in {tokenizer.decode(ids[: max(0, count - held)]) for held in range(4)}
    assert out + detokenizer.flush() == final


def test_all_short_sequences_of_tricky_bytes(tokenizer: Tokenizer) -> None:
    """The decoder of the library and this one replace broken bytes alike, exhaustively."""
    for data in itertools.product(TRICKY, repeat=3):
        ids = byte_ids(bytes(data))
        got = deltas(IncrementalDetokenizer(tokenizer), [[number] for number in ids])
        assert "".join(got) == tokenizer.decode(ids)


@settings(deadline=None, derandomize=True, max_examples=200)
@given(text=st.text(), special_after=st.sets(st.integers(0, 40)))
def test_valid_text_is_complete_without_flush(
    tokenizer: Tokenizer, text: str, special_after: set[int]
) -> None:
    detokenizer = IncrementalDetokenizer(tokenizer)
    out = ""
    for place, number in enumerate(tokenizer.encode(text)):
        out += detokenizer.push([number])
        if place in special_after:
            assert detokenizer.push([2]) == ""
    assert out == text
    assert detokenizer.flush() == ""


def test_a_push_looks_at_its_own_ids_only(tokenizer: Tokenizer) -> None:
    """The cost of a push does not grow with the text so far."""

    class Counting(Tokenizer):
        looked_up = 0

        def token_bytes(self, token_id: int) -> bytes:
            self.looked_up += 1
            return tokenizer.token_bytes(token_id)

        def is_special(self, token_id: int) -> bool:
            return tokenizer.is_special(token_id)

        def decode(self, ids: object, *, skip_special_tokens: bool = True) -> str:
            pytest.fail("decoding from the start again")

    counting = Counting.__new__(Counting)
    detokenizer = IncrementalDetokenizer(counting)
    for number in itertools.islice(itertools.cycle(byte_ids(f"é{SMILEY}".encode())), 6000):
        detokenizer.push([number])
    assert counting.looked_up == 6000
