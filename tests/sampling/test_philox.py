"""The counter-based generator. Known answers come from the published Philox test vectors and from
DeepInfer's own streams; everything else is compared with Python integers."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_neuron.ops.philox import draw_words, philox, seed_bits
from deepinfer_neuron.sampling.state import completion_seed
from tests.sampling import plain

WORD = st.integers(0, 2**32 - 1)
DRAFT_SEED_OFFSET = 1000000007


def hexadecimal(words: torch.Tensor) -> str:
    return " ".join(f"{word:08x}" for word in words.tolist())


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ([0] * 4, [0] * 2, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_published_vectors(counter: list[int], key: list[int], expected: str) -> None:
    assert hexadecimal(philox(torch.tensor(counter), torch.tensor(key))) == expected


@pytest.mark.parametrize(
    ("seed", "position", "case", "expected"),
    [
        (0, 0, 0, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        (42, 0, 0, "9ceaf053 77f5493b 12bf50ad 5742b3d7"),
        (42, 10, 0, "0d048bed de24129f 996dff4c 4a357fc2"),
        (42, 10, 1, "4429196d c9b8a7bf a0ab64ba c5cb22a1"),
        (42, 10, 2, "a642fd96 2ddfdd4b ea3d49bf 175db07a"),
        (42 + DRAFT_SEED_OFFSET, 10, 0, "e36c29db 962df9ac 080c6bd8 b2b3f7fa"),
        (2**63 + 1, 7, 0, "0df8fb36 7da64eb6 7fca8c5e 3961cb67"),
        (42, 10 + 10000019, 0, "47122b04 f805eab9 cd2fc705 72b06da4"),
    ],
)
def test_streams_of_a_seed_and_a_position(
    seed: int, position: int, case: int, expected: str
) -> None:
    [words] = draw_words(seed_bits([seed]), torch.tensor([position]), case)
    assert hexadecimal(words) == expected


@settings(deadline=None, derandomize=True, max_examples=60)
@given(st.lists(st.tuples(WORD, WORD, WORD, WORD, WORD, WORD), min_size=1, max_size=5))
def test_every_row_equals_integer_arithmetic(rows: list[tuple[int, ...]]) -> None:
    values = torch.tensor(rows)
    expected = [list(plain.philox(row[:4], row[4:])) for row in rows]
    assert philox(values[:, :4], values[:, 4:]).tolist() == expected


@settings(deadline=None, derandomize=True, max_examples=60)
@given(st.integers(0, 2**64 - 1), st.integers(0, 2**31 - 1), st.integers(0, 2))
def test_the_sequence_number_wraps_at_32_bits_and_keeps_its_sign(
    seed: int, position: int, case: int
) -> None:
    [words] = draw_words(seed_bits([seed]), torch.tensor([position]), case)
    assert words.tolist() == list(plain.words(seed, position, case))


def test_a_negative_sequence_number_fills_the_upper_counter_word() -> None:
    position = 2**31 // 3 + 1
    [words] = draw_words(seed_bits([5]), torch.tensor([position]))
    negative = 3 * position - 2**32
    assert words.tolist() == list(plain.philox((0, 0, negative % 2**32, 2**32 - 1), (5, 0)))


def test_completions_get_distinct_seeds_and_the_first_keeps_its_own() -> None:
    seeds = [completion_seed(2**63 + 5, index) for index in range(100)]
    assert seeds[0] == 2**63 + 5
    assert len(set(seeds)) == 100
    assert all(0 <= seed < 2**64 for seed in seeds)
    low, high, _, _ = plain.philox((3, 1, 0, 0), (5, 2**31))
    assert seeds[3] == low + 2**32 * high
