"""Byte layouts of cached vectors."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from deepinfer_neuron.cache.records import (
    Codec,
    CodecSet,
    CompressedCodec,
    IndexCodec,
    RawCodec,
    WindowCodec,
)
from deepinfer_neuron.ops.arithmetic import fixed_arithmetic
from deepinfer_neuron.ops.quant import (
    q4_cache_codes,
    q4_index,
    q4_index_codes,
    q8,
    q8_codes,
)
from tests.ops.number_formats import (
    bf16,
    e2m1_values,
    e4m3_values,
    normal,
    random_bytes,
    same_bits,
    wide,
)

RELEASED = CodecSet.of(head_dim=512, index_head_dim=128, rounding=True)
PACKED = pytest.mark.parametrize("codec", [WindowCodec(64), CompressedCodec(64), IndexCodec(64)])


def test_released_widths() -> None:
    """Bytes per record of the published layout, data and scales."""
    codecs = (RELEASED.window, RELEASED.compressed, RELEASED.index)
    assert [codec.width for codec in codecs] == [528, 288, 68]
    assert [(codec.data_width, codec.scale_width) for codec in codecs] == [
        (512, 16),
        (256, 32),
        (64, 4),
    ]
    assert {codec.dtype for codec in codecs} == {torch.uint8}


def test_widths_without_rounding() -> None:
    codecs = CodecSet.of(head_dim=96, index_head_dim=32, rounding=False)
    parts = (codecs.window, codecs.compressed, codecs.index)
    assert [codec.width for codec in parts] == [96, 96, 32]
    assert {codec.dtype for codec in parts} == {torch.float32}


class TestLayout:
    """Which byte is which."""

    X = normal((6, 64), 1)

    def test_window_record(self) -> None:
        """64 e4m3 bytes, then the scales of channels 0..31 and 32..63."""
        record = WindowCodec(64).pack(self.X).numpy()
        assert record.shape == (6, 66)
        codes, scale = q8_codes(self.X)
        assert np.array_equal(record[:, :64], codes.numpy())
        assert np.array_equal(record[:, 64:], scale.numpy())
        values = e4m3_values(record[:, :64].astype(np.int64))
        values[:, :32] *= np.exp2(record[:, 64:65] - 127.0)
        values[:, 32:] *= np.exp2(record[:, 65:66] - 127.0)
        assert np.array_equal(values, wide(q8(self.X, fixed_arithmetic())))

    def test_compressed_record(self) -> None:
        """32 bytes of nibble pairs, even channel low, then 4 e4m3 scales of 16 channels each."""
        record = CompressedCodec(64).pack(self.X).numpy()
        assert record.shape == (6, 36)
        packed, scale = q4_cache_codes(self.X)
        assert np.array_equal(record[:, :32], packed.numpy())
        assert np.array_equal(record[:, 32:], scale.numpy())
        values = np.zeros((6, 64))
        for channel in range(64):
            byte = record[:, channel // 2].astype(np.int64)
            nibble = byte % 16 if channel % 2 == 0 else byte // 16
            sigma = e4m3_values(record[:, 32 + channel // 16].astype(np.int64))
            values[:, channel] = e2m1_values(nibble) * sigma
        assert np.array_equal(values, wide(CompressedCodec(64).unpack(torch.from_numpy(record))))

    def test_index_record(self) -> None:
        """32 bytes of nibble pairs, then the scales of channels 0..31 and 32..63."""
        record = IndexCodec(64).pack(self.X).numpy()
        assert record.shape == (6, 34)
        packed, scale = q4_index_codes(self.X)
        assert np.array_equal(record, np.concatenate((packed.numpy(), scale.numpy()), axis=1))
        got = IndexCodec(64).unpack(torch.from_numpy(record))
        assert torch.equal(got, q4_index(self.X, fixed_arithmetic()))


class TestRoundTrip:
    """Values in, values out."""

    @PACKED
    def test_parts_and_records_agree(self, codec: Codec) -> None:
        x = normal((9, 64), 2)
        data, scale = codec.encode(x)
        assert data.shape == (9, codec.data_width)
        assert scale.shape == (9, codec.scale_width)
        assert same_bits(codec.unpack(codec.pack(x)), codec.decode(data, scale))

    @PACKED
    def test_values_are_close(self, codec: Codec) -> None:
        x = normal((9, 64), 3)
        got = codec.unpack(codec.pack(x))
        assert got.dtype == torch.bfloat16
        step = 2.0**-4 if isinstance(codec, WindowCodec) else 0.26
        assert (np.abs(wide(got) - wide(x)) <= step * np.abs(wide(x)).max()).all()

    @pytest.mark.parametrize("codec", [WindowCodec(64), IndexCodec(64)])
    def test_decoded_values_can_be_stored_again(self, codec: Codec) -> None:
        """Prefill stores window keys that it has already rounded."""
        once = codec.unpack(codec.pack(normal((50, 64), 4)))
        assert torch.equal(codec.unpack(codec.pack(once)), once)

    @PACKED
    def test_any_bytes_decode_row_by_row(self, codec: Codec) -> None:
        records = random_bytes((20, codec.width), 5, 0, 0x7F)
        one_by_one = [codec.unpack(record) for record in records.split(1)]
        assert same_bits(torch.cat(one_by_one), codec.unpack(records))
        assert same_bits(codec.unpack(records.view(4, 5, -1)).flatten(0, 1), codec.unpack(records))

    @PACKED
    def test_zero_records_are_zeros(self, codec: Codec) -> None:
        """Fresh caches hold zero bytes."""
        got = codec.unpack(torch.zeros(3, codec.width, dtype=torch.uint8))
        assert same_bits(got, torch.zeros(3, 64, dtype=torch.bfloat16))

    @PACKED
    def test_no_records(self, codec: Codec) -> None:
        assert codec.pack(normal((0, 64), 6)).shape == (0, codec.width)
        assert codec.unpack(torch.empty(0, codec.width, dtype=torch.uint8)).shape == (0, 64)

    def test_raw_records_keep_every_bit(self) -> None:
        x = normal((7, 64), 7, torch.float32)
        codec = RawCodec(64)
        assert same_bits(codec.unpack(codec.pack(x)), x)
        assert not np.array_equal(wide(x), bf16(x.numpy()))
