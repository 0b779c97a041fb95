"""The bucket ladder: every step has a shape, the smallest one, and there are no others."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer_neuron.errors import ConfigError
from deepinfer_neuron.model.shapes import PassShape
from deepinfer_neuron.runner.buckets import Ladder


def released_ladder() -> Ladder:
    """Four sequences with five drafts, prompts in chunks of 512, up to 32768 tokens."""
    return Ladder.build(
        max_num_seqs=4,
        max_num_batched_tokens=512,
        max_model_len=32768,
        nextn=5,
        lowest_width=16384 // 128,
    )


def test_the_ladder_of_an_engine() -> None:
    ladder = released_ladder()
    assert ladder.sequences == (1, 2, 4)
    assert ladder.decode_rows == (8,)
    assert ladder.prefill_rows == (128, 256, 512)
    assert ladder.widths == (128, 256)
    # 3 numbers of sequences x 2 widths, 3 chunk sizes x 2 widths.
    assert len(ladder.passes()) == 12
    assert ladder.draft_passes() == tuple(PassShape(s, 8, 0, 5) for s in (1, 2, 4))


def test_six_rows_run_as_eight_with_two_empty() -> None:
    shape = released_ladder().decode_shape(num_sequences=1, drafts=5)
    assert shape == PassShape(sequences=1, rows=8, blocks=128, outputs=6)
    assert released_ladder().decode_shape(3, 2, blocks=129) == PassShape(4, 8, 256, 6)


def test_a_step_that_verifies_fewer_drafts_may_have_its_own_rows() -> None:
    ladder = Ladder.build(
        max_num_seqs=1, max_num_batched_tokens=8, max_model_len=128, nextn=5,
        lowest_prefill=8, varying_drafts=True,
    )  # fmt: skip
    assert ladder.decode_rows == (1, 2, 4, 8)
    shapes = [ladder.decode_shape(1, drafts) for drafts in range(6)]
    assert [(shape.rows, shape.outputs) for shape in shapes] == [
        (1, 1), (2, 2), (4, 4), (4, 4), (8, 6), (8, 6),
    ]  # fmt: skip


def test_a_prompt_chunk_needs_a_table_for_itself() -> None:
    ladder = Ladder.build(max_num_seqs=1, max_num_batched_tokens=512, max_model_len=1024)
    assert ladder.widths == (1, 2, 4, 8)
    assert ladder.prefill_shape(300) == PassShape(1, 512, 4, 1)
    # A chunk of the bucket 512 has at least 257 rows, so a table of two blocks cannot occur.
    assert {p.blocks for p in ladder.prefill_passes() if p.rows == 512} == {4, 8}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs is 0"),
        ({"max_num_batched_tokens": -1}, "max_num_batched_tokens is -1"),
        ({"max_model_len": 0}, "max_model_len is 0"),
        ({"nextn": -1}, "nextn is -1"),
        ({"lowest_prefill": 0}, "lowest_prefill is 0"),
        ({"lowest_width": 0}, "lowest_width is 0"),
    ],
)
def test_a_limit_below_one_is_refused(wrong: dict[str, int], message: str) -> None:
    limits = {"max_num_seqs": 1, "max_num_batched_tokens": 128, "max_model_len": 128}
    with pytest.raises(ConfigError, match=message):
        Ladder.build(**(limits | wrong))


@pytest.mark.parametrize("buckets", [(), (3,), (2, 1), (1, 1), (0, 1), (-2,)])
def test_buckets_are_ascending_powers_of_two(buckets: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="sequences is"):
        Ladder(buckets, (1,), (128,), (1,))


def test_decode_rows_hold_the_drafts() -> None:
    with pytest.raises(ConfigError, match="end with at least 8"):
        Ladder((1,), (4,), (128,), (1,), nextn=5)


def test_what_does_not_fit_is_refused_with_the_limit_to_change() -> None:
    ladder = released_ladder()
    with pytest.raises(ConfigError, match=r"5 sequences .* 1, 2, 4; .* max_num_seqs"):
        ladder.decode_shape(5, 0)
    with pytest.raises(ConfigError, match="0 sequences"):
        ladder.decode_shape(0, 0)
    with pytest.raises(ConfigError, match="6 drafts"):
        ladder.decode_shape(1, 6)
    with pytest.raises(ConfigError, match=r"513 prompt rows .* max_num_batched_tokens"):
        ladder.prefill_shape(513)
    with pytest.raises(ConfigError, match=r"257 blocks .* max_model_len"):
        ladder.table_width(257)
    with pytest.raises(ConfigError, match="nextn is 0"):
        Ladder((1,), (1,), (1,), (1,)).draft_shape(1)


@st.composite
def limits(draw: st.DrawFn) -> dict[str, int | bool]:
    """Limits of a small or large engine."""
    return {
        "max_num_seqs": draw(st.integers(1, 300)),
        "max_num_batched_tokens": draw(st.integers(1, 10_000)),
        "max_model_len": draw(st.integers(1, 2**20)),
        "nextn": draw(st.integers(0, 7)),
        "lowest_prefill": draw(st.sampled_from([1, 16, 100, 128])),
        "lowest_width": draw(st.sampled_from([1, 3, 128])),
        "varying_drafts": draw(st.booleans()),
    }


@given(limits(), st.data())
def test_every_decode_step_has_the_smallest_bucket(
    limit: dict[str, int | bool], data: st.DataObject
) -> None:
    ladder = Ladder.build(**limit)
    count = data.draw(st.integers(1, limit["max_num_seqs"]))
    drafts = data.draw(st.integers(0, limit["nextn"]))
    blocks = data.draw(st.integers(1, -(-limit["max_model_len"] // 128)))
    shape = ladder.decode_shape(count, drafts, blocks)
    assert shape in ladder.passes()
    assert shape.sequences >= count
    assert shape.rows >= 1 + drafts
    assert shape.blocks >= blocks
    assert 1 + drafts <= shape.outputs <= shape.rows
    fitting = [
        (p.sequences, p.rows, p.blocks)
        for p in ladder.decode_passes()
        if p.sequences >= count and p.rows >= 1 + drafts and p.blocks >= blocks
    ]
    assert (shape.sequences, shape.rows, shape.blocks) == min(fitting)
    # Doubling wastes less than half of a bucket, above the lowest one.
    assert shape.sequences < 2 * count


@given(limits(), st.data())
def test_every_prompt_chunk_has_the_smallest_bucket(
    limit: dict[str, int | bool], data: st.DataObject
) -> None:
    ladder = Ladder.build(**limit)
    most = min(limit["max_num_batched_tokens"], limit["max_model_len"])
    rows = data.draw(st.integers(1, most))
    blocks = data.draw(st.integers(-(-rows // 128), -(-limit["max_model_len"] // 128)))
    shape = ladder.prefill_shape(rows, blocks)
    assert shape in ladder.passes()
    fitting = [p for p in ladder.prefill_passes() if p.rows >= rows and p.blocks >= blocks]
    assert shape == min(fitting)


@given(limits())
def test_the_ladder_is_closed(limit: dict[str, int | bool]) -> None:
    """Asking for a bucket gives that bucket, and every pass of the list can be asked for."""
    ladder = Ladder.build(**limit)
    for shape in ladder.decode_passes():
        drafts = min(shape.rows, 1 + ladder.nextn) - 1
        assert ladder.decode_shape(shape.sequences, drafts, shape.blocks) == shape
    below = dict(zip(ladder.prefill_rows, (0, *ladder.prefill_rows[:-1]), strict=True))
    for shape in ladder.prefill_passes():
        assert ladder.prefill_shape(below[shape.rows] + 1, shape.blocks) == shape
    for shape in ladder.draft_passes():
        assert ladder.draft_shape(shape.sequences) == shape
    assert len(set(ladder.passes())) == len(ladder.passes())
