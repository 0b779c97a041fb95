"""Synthetic checkpoints: released format, reproducible bytes, sensible weights, careful writing."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import safetensors
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from tokenizers import Tokenizer

from deepinfer_neuron.checkpoint import tiny_weights
from deepinfer_neuron.checkpoint.config import ModelConfig, Role, load_config, parse_config
from deepinfer_neuron.checkpoint.engram import compress_vocabulary
from deepinfer_neuron.checkpoint.names import inventory
from deepinfer_neuron.checkpoint.tiny import INDEX_FILE, PRESETS, write_checkpoint
from deepinfer_neuron.checkpoint.tiny_presets import complete_config, get_preset, text_section
from deepinfer_neuron.checkpoint.tiny_tokenizer import build_tokenizer, write_tokenizer
from deepinfer_neuron.checkpoint.tiny_weights import (
    CALM,
    WILD,
    Recipe,
    Stream,
    WeightWriter,
    scale_mix,
)
from deepinfer_neuron.errors import CheckpointError, ConfigError


@pytest.fixture(scope="module")
def nano(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One nano checkpoint for all tests that only read."""
    return write_checkpoint(tmp_path_factory.mktemp("checkpoints") / "nano", "nano", seed=3)


@pytest.fixture(scope="module")
def nano_config(nano: Path) -> ModelConfig:
    return load_config(nano)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_str(json.dumps(build_tokenizer(1024)))


def read_index(directory: Path) -> dict[str, dict[str, object]]:
    index: dict[str, dict[str, object]] = json.loads((directory / INDEX_FILE).read_text("utf-8"))
    return index


def read_header(shard: Path) -> dict[str, dict[str, object]]:
    """The header of a safetensors file, read by hand: 8 bytes of length, then JSON."""
    data = shard.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header: dict[str, dict[str, object]] = json.loads(data[8 : 8 + length])
    return header


def file_digests(directory: Path) -> dict[str, str]:
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in directory.iterdir()
    }


def tensor_bytes(weights: WeightWriter, name: str) -> NDArray[np.uint8]:
    return np.concatenate(list(weights.chunks(name)))


def drop(config: ModelConfig, recipe: Recipe, name: str) -> NDArray[np.int64]:
    """How much smaller the recipe makes each byte of a scale tensor."""
    plain, lowered = (
        tensor_bytes(WeightWriter(config, chosen, seed=0), name).astype(np.int64)
        for chosen in (WILD, recipe)
    )
    shape = WeightWriter(config, recipe, seed=0).specs[name].shape
    return (plain - lowered).reshape(shape)


def values(weights: WeightWriter, name: str) -> NDArray[np.float32]:
    """A BF16 or F32 tensor as fp32."""
    raw = torch.from_numpy(tensor_bytes(weights, name))
    bf16 = weights.specs[name].dtype == "BF16"
    typed = raw.view(torch.bfloat16 if bf16 else torch.float32)
    return np.asarray(typed.float().numpy(), dtype=np.float32)


def preset_config_of(name: str, directory: Path) -> ModelConfig:
    """The configuration of a preset without writing its weights."""
    section = text_section(get_preset(name), None)
    vocab_size = section["vocab_size"]
    assert isinstance(vocab_size, int)
    tokenizer_json = write_tokenizer(directory, vocab_size, max_length=4096)
    return parse_config(complete_config(get_preset(name), section, tokenizer_json), name)


class TestFormat:
    def test_tiny_has_the_specified_size(self, tmp_path: Path) -> None:
        config = preset_config_of("tiny", tmp_path)
        specs = inventory(config)
        assert len(specs) == 974
        assert sum(spec.nbytes for spec in specs) == 41_927_384
        assert config.engram is not None
        assert config.engram.num_embeddings == (6126, 6332)
        assert (config.image_token_id, config.draft and config.draft.noise_token_id) == (1000, 1001)

    def test_mid_stays_within_its_budget(self, tmp_path: Path) -> None:
        specs = inventory(preset_config_of("mid", tmp_path))
        assert 2.0e9 < sum(spec.nbytes for spec in specs) < 3.0e9

    def test_every_tensor_has_a_rule(self, tmp_path: Path) -> None:
        for name in PRESETS:
            weights = WeightWriter(preset_config_of(name, tmp_path), CALM, seed=0)
            for tensor in weights.specs:
                weights.chunks(tensor)

    def test_index_covers_the_inventory_over_several_shards(
        self, nano: Path, nano_config: ModelConfig
    ) -> None:
        index = read_index(nano)
        specs = inventory(nano_config)
        assert index["weight_map"].keys() == {spec.name for spec in specs}
        assert index["metadata"]["total_size"] == sum(spec.nbytes for spec in specs)
        shards = set(index["weight_map"].values())
        assert len(shards) > 1
        assert shards == {path.name for path in nano.glob("*.safetensors")}

    def test_nano_is_small(self, nano: Path) -> None:
        assert sum(path.stat().st_size for path in nano.iterdir()) < 4_500_000

    def test_headers_match_inventory_and_are_aligned(
        self, nano: Path, nano_config: ModelConfig
    ) -> None:
        expected = {spec.name: spec for spec in inventory(nano_config)}
        for shard in nano.glob("*.safetensors"):
            header = read_header(shard)
            header.pop("__metadata__")
            end = 0
            for name, entry in header.items():
                spec = expected.pop(name)
                assert (entry["dtype"], entry["shape"]) == (spec.dtype, list(spec.shape))
                assert entry["data_offsets"] == [end, end + spec.nbytes]
                assert end % {"F32": 4, "BF16": 2}.get(spec.dtype, 1) == 0
                end += spec.nbytes
            length = int.from_bytes(shard.read_bytes()[:8], "little")
            assert length % 8 == 0
            assert shard.stat().st_size == 8 + length + end
        assert not expected

    def test_the_public_reader_accepts_the_shards(
        self, nano: Path, nano_config: ModelConfig
    ) -> None:
        weights = WeightWriter(nano_config, CALM, seed=3)
        shard = min(nano.glob("*.safetensors"))
        with safetensors.safe_open(shard, framework="pt") as file:
            for name in ("embed.weight", "layers.0.hc_attn_fn", "layers.0.attn.wq_a.weight"):
                stored = file.get_tensor(name)
                assert stored.shape == weights.specs[name].shape
                raw = stored.contiguous().view(torch.uint8).reshape(-1).numpy()
                assert np.array_equal(raw, tensor_bytes(weights, name))

    def test_a_table_and_its_scales_share_a_shard(self, nano: Path) -> None:
        weight_map = read_index(nano)["weight_map"]
        for layer in (1, 4):
            stem = f"layers.{layer}.engram.embed"
            assert weight_map[f"{stem}.weight"] == weight_map[f"{stem}.scale"]

    def test_nano_holds_every_role(self, nano_config: ModelConfig) -> None:
        found = {
            (layer.role, layer.ratio, layer.engram is not None) for layer in nano_config.layers
        }
        assert found == {
            (Role.SWA, 0, False),
            (Role.SWA, 0, True),
            (Role.FULL, 2, False),
            (Role.FULL, 2, True),
            (Role.REUSE, 2, False),
            (Role.FULL, 1, False),
            (Role.REUSE, 1, False),
            (Role.REINDEX, 1, False),
        }


class TestReproducibility:
    def test_same_seed_same_files(self, nano: Path, tmp_path: Path) -> None:
        again = write_checkpoint(tmp_path / "again", "nano", seed=3)
        assert file_digests(again) == file_digests(nano)

    def test_another_seed_changes_weights_only(self, nano: Path, tmp_path: Path) -> None:
        other = file_digests(write_checkpoint(tmp_path / "other", "nano", seed=4))
        first = file_digests(nano)
        same = {name for name, digest in first.items() if other[name] == digest}
        assert same == {"config.json", "tokenizer.json", "tokenizer_config.json"}

    def test_no_two_tensors_are_alike(self, nano_config: ModelConfig) -> None:
        """Equal contents would hide swapped tensors."""
        weights = WeightWriter(nano_config, CALM, seed=0)
        large = [name for name, spec in weights.specs.items() if math.prod(spec.shape) > 64]
        digests = {hashlib.sha256(tensor_bytes(weights, name).tobytes()).digest() for name in large}
        assert len(digests) == len(large)

    def test_stream_is_philox_keyed_by_seed_and_name(self) -> None:
        """Ten rounds of Philox 4x64 written out, with the counter starting at 1."""
        mask = (1 << 64) - 1
        digest = hashlib.blake2b(b"7:embed.weight", digest_size=16).digest()
        keys = [int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:], "little")]
        words = [1, 0, 0, 0]
        for _ in range(10):
            first = words[0] * 0xD2E7470EE14C6C93
            third = words[2] * 0xCA5A826395121157
            words = [
                (third >> 64) ^ words[1] ^ keys[0],
                third & mask,
                (first >> 64) ^ words[3] ^ keys[1],
                first & mask,
            ]
            keys = [(keys[0] + 0x9E3779B97F4A7C15) & mask, (keys[1] + 0xBB67AE8584CAA73B) & mask]
        assert Stream(7, "embed.weight").words(4).tolist() == words

    def test_little_memory_at_a_time(self, tmp_path: Path) -> None:
        weights = WeightWriter(preset_config_of("mid", tmp_path), CALM, seed=0)
        largest = next(weights.chunks("layers.1.engram.embed.weight"))
        assert largest.nbytes == tiny_weights.CODES_PER_CHUNK
        assert weights.specs["layers.1.engram.embed.weight"].nbytes > 50 * largest.nbytes


class TestWeights:
    def test_e4m3_codes_are_finite_and_uniform(self) -> None:
        codes = Stream(0, "codes").e4m3(254 * 400)
        counts = np.bincount(codes, minlength=256)
        assert counts[0x7F] == counts[0xFF] == 0
        drawn = np.delete(counts, [0x7F, 0xFF])
        assert drawn.min() > 300
        assert drawn.max() < 500

    def test_code_deviations(self) -> None:
        """Against another decoder of the 254 finite codes, and the eight e2m1 magnitudes."""
        decoded = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
        finite = decoded[decoded.isfinite()]
        assert finite.square().mean().item() == pytest.approx(tiny_weights.E4M3_MEAN_SQUARE)
        assert math.sqrt(tiny_weights.E2M1_MEAN_SQUARE) == pytest.approx(2.926, abs=0.0005)

    @settings(deadline=None, derandomize=True)
    @given(st.floats(1e-9, 1e3))
    def test_scale_mix_hits_the_wanted_mean_square(self, target: float) -> None:
        mix = scale_mix("any", target)
        below, above = mix.below / 65536, mix.above / 65536
        center = 1 - below - above
        assert min(below, above, center) > 0
        mean = 4.0 ** (mix.center - 127) * (below / 4 + center + above * 4)
        assert mean == pytest.approx(target, rel=1e-3)

    @pytest.mark.parametrize(
        ("name", "packed"),
        [
            ("layers.0.attn.wq_b", False),
            ("layers.2.attn.wo_b", False),
            ("layers.3.ffn.experts.5.w2", True),
            ("mtp.1.ffn.experts.0.w1", True),
        ],
    )
    def test_matrices_keep_unit_variance(
        self, nano_config: ModelConfig, name: str, packed: bool
    ) -> None:
        """Dequantized by the definition of the formats: std is the inverse root of the width."""
        weights = WeightWriter(nano_config, WILD, seed=1)
        codes = torch.from_numpy(tensor_bytes(weights, f"{name}.weight"))
        shape = weights.specs[f"{name}.scale"].shape
        exponents = tensor_bytes(weights, f"{name}.scale").astype(np.int64).reshape(shape) - 127
        if packed:
            magnitudes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
            table = torch.cat([magnitudes, -magnitudes])
            decoded = torch.stack([table[(codes & 15).long()], table[(codes >> 4).long()]], -1)
        else:
            decoded = codes.view(torch.float8_e4m3fn).float()
        width = weights.specs[f"{name}.weight"].shape[1] * (2 if packed else 1)
        matrix = decoded.reshape(-1, width).numpy()
        rows = 1 if packed else 32
        factors = np.exp2(exponents).repeat(rows, axis=0).repeat(32, axis=1)
        assert (matrix * factors).std() == pytest.approx(width**-0.5, rel=0.25)
        assert len(np.unique(exponents)) > 1

    def test_scale_bytes_give_normal_bfloat16(self, nano_config: ModelConfig) -> None:
        weights = WeightWriter(nano_config, CALM, seed=0)
        for name, spec in weights.specs.items():
            if spec.dtype == "F8_E8M0":
                scales = tensor_bytes(weights, name)
                assert 10 <= scales.min() <= scales.max() <= 246

    def test_shifts_take_powers_of_two(self, nano_config: ModelConfig) -> None:
        recipe = Recipe(
            first_residual_shift=2, residual_shift=5, engram_value_shift=3, query_shift=1
        )
        for name in ("attn.wo_b", "ffn.experts.1.w2", "ffn.shared_experts.w2"):
            for block, shift in (("layers.0", 2), ("layers.4", 5), ("mtp.0", 2), ("mtp.1", 5)):
                assert set(drop(nano_config, recipe, f"{block}.{name}.scale").ravel()) == {shift}
        for name in ("attn.wo_a", "ffn.experts.1.w1", "attn.wq_a"):
            assert not drop(nano_config, recipe, f"layers.4.{name}.scale").any()
        assert set(drop(nano_config, recipe, "layers.4.attn.wq_b.scale").ravel()) == {-1}
        engram = drop(nano_config, recipe, "layers.4.engram.wkv.scale")
        key_rows = 4 * nano_config.hidden_size // 32
        assert set(engram[:key_rows].ravel()) == {0}
        assert set(engram[key_rows:].ravel()) == {3}

    def test_loud_channels_move_on_with_every_site(self, nano_config: ModelConfig) -> None:
        """Of 128 channels, 32 are loud: they get a factor 2 back, half of it per doubling."""
        recipe = Recipe(residual_shift=6, quiet_shift=7)
        # One site for attention and one for experts in each of 9 layers and the draft blocks.
        sites = {
            "layers.1.attn.wo_b": 2,
            "layers.1.ffn.experts.3.w2": 3,
            "layers.2.ffn.shared_experts.w2": 5,
            "mtp.1.attn.wo_b": 2 * 10,
        }
        for name, site in sites.items():
            blocks = drop(nano_config, recipe, f"{name}.scale").reshape(4, -1)
            shifts = [set(block) for block in blocks]
            assert shifts.pop(site % 4) == {5}
            assert shifts == [{12}] * 3
        assert not drop(nano_config, recipe, "layers.0.attn.wo_b.scale").any()

    def test_unit_tensors(self, nano_config: ModelConfig) -> None:
        weights = WeightWriter(nano_config, CALM, seed=0)
        hidden = nano_config.hidden_size
        assert values(weights, "embed.weight").std() == pytest.approx(1.0, rel=0.02)
        head = values(weights, "head.weight").std()
        assert head == pytest.approx(CALM.head_gain * hidden**-0.5, rel=0.02)
        norm = values(weights, "layers.0.attn_norm.weight")
        assert norm.mean() == pytest.approx(1.0, abs=0.05)
        assert norm.std() == pytest.approx(CALM.norm_spread, rel=0.2)
        mix = values(weights, "layers.0.hc_attn_fn").std()
        assert mix == pytest.approx((4 * hidden) ** -0.5, rel=0.02)

    def test_hyper_connection_base_follows_the_layer(self, nano_config: ModelConfig) -> None:
        recipe = Recipe(hc_base_noise=0.0)
        weights = WeightWriter(nano_config, recipe, seed=0)
        diagonal = np.where(np.eye(4) > 0, 3.0, -3.0).ravel()
        for prefix, stream in (("layers.0", 0), ("layers.6", 2), ("mtp.0", 1)):
            base = values(weights, f"{prefix}.hc_ffn_base")
            assert base[:4].argmax() == stream
            assert sorted(base[:4]) == [-3.0, -3.0, -3.0, 3.0]
            assert (base[4:8] == 0).all()
            assert (base[8:] == diagonal).all()

    def test_small_tensors_are_neither_zero_nor_shared(self, nano_config: ModelConfig) -> None:
        """A dropped or swapped one must change the result."""
        weights = WeightWriter(nano_config, CALM, seed=0)
        text, image = (values(weights, f"layers.0.ffn.gate.{kind}") for kind in ("bias", "bias_vl"))
        assert (text != image).all()
        for name in ("layers.0.attn.attn_sink", "aligner.w1.bias", "image_end"):
            assert (values(weights, name) != 0).all()
        scale = values(weights, "layers.0.hc_attn_scale")
        assert scale.min() >= np.float32(CALM.hc_scale[0])
        assert scale.max() <= np.float32(CALM.hc_scale[1])

    def test_scales_outside_the_usable_range_are_refused(self, tmp_path: Path) -> None:
        target = tmp_path / "model"
        with pytest.raises(ConfigError, match="smaller shift"):
            write_checkpoint(target, "nano", recipe=Recipe(residual_shift=120))
        assert list(tmp_path.iterdir()) == []


class TestTokenizer:
    @pytest.mark.parametrize(
        ("token", "token_id"),
        [
            ("<｜▁pad▁｜>", 2),
            ("!", 3),
            ("Ń", 258),
            ("<｜deepseek_image｜>", 1000),
            ("<｜System｜>", 1001),
        ],
    )
    def test_fixed_ids(self, tokenizer: Tokenizer, token: str, token_id: int) -> None:
        assert tokenizer.token_to_id(token) == token_id
        assert tokenizer.id_to_token(token_id) == token

    def test_chat_tokens_are_single_ids_at_the_top(self, tokenizer: Tokenizer) -> None:
        assert tokenizer.get_vocab_size() == 1024
        for name in [
            "<｜User｜>",
            "<｜Assistant｜>",
            "<think>",
            "</think>",
            "｜DSML｜",
            "<｜action｜>",
        ]:
            (token_id,) = tokenizer.encode(name).ids
            assert token_id >= 976

    @settings(deadline=None, derandomize=True)
    @given(st.text(st.characters(codec="utf-8")))
    def test_any_text_survives(self, tokenizer: Tokenizer, text: str) -> None:
        ids = tokenizer.encode(text).ids
        assert tokenizer.decode(ids, skip_special_tokens=False) == text

    def test_digits_come_in_groups_of_at_most_three(self, tokenizer: Tokenizer) -> None:
        tokens = tokenizer.encode("1001000200").tokens
        assert all(len(token) <= 3 for token in tokens)

    def test_words_are_merged(self, tokenizer: Tokenizer) -> None:
        assert tokenizer.encode("The").tokens == ["The"]
        assert tokenizer.encode(" the").tokens == ["Ġthe"]

    def test_compressed_vocabulary_merges_spellings(self, tmp_path: Path) -> None:
        path = write_tokenizer(tmp_path, 1024, max_length=4096)
        table = compress_vocabulary(path)
        tokenizer = Tokenizer.from_file(str(path))
        spellings = [tokenizer.token_to_id(text) for text in ("the", "Ġthe", "The", "ĠThe", "THE")]
        assert None not in spellings
        assert len({int(table[token_id]) for token_id in spellings}) == 1
        assert len(table) == 1024
        assert int(table.max()) + 1 < 900

    def test_settings_file(self, nano: Path) -> None:
        stored = json.loads((nano / "tokenizer_config.json").read_text("utf-8"))
        assert (stored["add_bos_token"], stored["add_eos_token"]) == (True, False)
        assert stored["bos_token"] == "<｜begin▁of▁sentence｜>"
        assert stored["eos_token"] == "<｜end▁of▁sentence｜>"
        assert stored["pad_token"] == "<｜▁pad▁｜>"

    @pytest.mark.parametrize("vocab_size", [100, 307, 1_000_000])
    def test_impossible_sizes_are_refused(self, vocab_size: int) -> None:
        with pytest.raises(ConfigError, match="vocab_size"):
            build_tokenizer(vocab_size)


class TestDirectory:
    def test_repeating_is_a_no_op(self, nano: Path) -> None:
        before = {path.name: path.stat().st_mtime_ns for path in nano.iterdir()}
        assert write_checkpoint(nano, "nano", seed=3) == nano
        assert {path.name: path.stat().st_mtime_ns for path in nano.iterdir()} == before

    def test_another_recipe_replaces_a_finished_checkpoint(self, tmp_path: Path) -> None:
        target = tmp_path / "model"
        first = file_digests(write_checkpoint(target, "nano"))
        second = file_digests(write_checkpoint(target, "nano", wild=True))
        assert first.keys() == second.keys()
        assert first != second
        assert [path.name for path in tmp_path.iterdir()] == ["model"]

    def test_an_empty_directory_is_filled(self, tmp_path: Path) -> None:
        write_checkpoint(tmp_path / "a" / "b", "nano")
        (tmp_path / "c").mkdir()
        write_checkpoint(tmp_path / "c", "nano")
        assert file_digests(tmp_path / "c") == file_digests(tmp_path / "a" / "b")

    def test_foreign_contents_are_left_alone(self, tmp_path: Path) -> None:
        (tmp_path / "notes.txt").write_text("mine")
        with pytest.raises(CheckpointError, match="choose another path"):
            write_checkpoint(tmp_path, "nano")
        assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
        with pytest.raises(CheckpointError, match="choose another path"):
            write_checkpoint(tmp_path / "notes.txt", "nano")

    def test_a_foreign_checkpoint_stays(self, tmp_path: Path) -> None:
        (tmp_path / INDEX_FILE).write_text('{"metadata": {"total_size": 1}, "weight_map": {}}')
        with pytest.raises(CheckpointError, match="not a finished synthetic checkpoint"):
            write_checkpoint(tmp_path, "nano")

    def test_an_unwritable_place_is_reported(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        with pytest.raises(CheckpointError, match="could not write"):
            write_checkpoint(tmp_path / "file" / "model", "nano")


class TestArguments:
    def test_unknown_preset_names_the_known_ones(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="nano, tiny, mid"):
            write_checkpoint(tmp_path / "model", "huge")

    def test_overrides_move_what_follows_from_them(self, tmp_path: Path) -> None:
        changes: Mapping[str, object] = {"vocab_size": 640, "engram_vocab_size": 100}
        config = load_config(write_checkpoint(tmp_path / "model", "nano", overrides=changes))
        assert config.vocab_size == 640
        assert config.image_token_id == 616
        assert config.draft is not None
        assert config.draft.noise_token_id == 617
        assert config.engram is not None
        # Twelve primes from 101 on, six per layer.
        first = (101 + 103 + 107 + 109 + 113 + 127, 131 + 137 + 139 + 149 + 151 + 157)
        assert config.engram.num_embeddings == first

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"hiden_size": 64}, "hiden_size"),
            ({"vocab_size": "many"}, "vocab_size"),
            ({"engram_layer_ids": 3}, "engram_layer_ids"),
            ({"hidden_size": {1, 2}}, "JSON"),
            ({"num_hidden_layers": 5}, "compress_ratios"),
        ],
    )
    def test_bad_values(self, tmp_path: Path, changes: Mapping[str, object], message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            write_checkpoint(tmp_path / "model", "nano", overrides=changes)
        assert list(tmp_path.iterdir()) == []

    def test_a_network_without_memory_and_drafts(self, tmp_path: Path) -> None:
        changes: Mapping[str, object] = {
            "engram_layer_ids": [],
            "num_nextn_predict_layers": 0,
            "compress_ratios": [0, 0, 2, 2, 2, 1, 1, 1, 1],
        }
        config = load_config(write_checkpoint(tmp_path / "model", "nano", overrides=changes))
        assert config.engram is None
        assert config.draft is None

    def test_recipe_and_wild_exclude_each_other(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="only one"):
            write_checkpoint(tmp_path / "model", "nano", wild=True, recipe=WILD)

    def test_progress_is_shown_on_request(
        self, tmp_path: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        write_checkpoint(tmp_path / "quiet", "nano")
        assert capfd.readouterr().err == ""
        write_checkpoint(tmp_path / "loud", "nano", progress=True)
        assert "100%" in capfd.readouterr().err
