"""The validated configuration as plain frozen data."""

from __future__ import annotations

from dataclasses import dataclass

from deepinfer_neuron.checkpoint.schedule import LayerSpec, first_uncompressed


@dataclass(frozen=True)
class RopeScaling:
    """YaRN parameters of the compressed layers' rotary embedding (no magnitude scaling)."""

    factor: float
    beta_fast: float
    beta_slow: float
    original_max_position_embeddings: int


@dataclass(frozen=True)
class EngramConfig:
    """The n-gram memory: one table per layer, hashed by every n-gram order and head."""

    layer_ids: tuple[int, ...]
    num_embeddings: tuple[int, ...]
    """Rows of each layer's table, which is the sum of that layer's bucket primes."""
    max_ngram_size: int
    vocab_size: int
    """Lower bound of the bucket primes."""
    n_heads: int
    head_dim: int
    """Width of one table row."""
    pad_token_id: int
    """Raw token id that stands for positions before the sequence starts."""
    compressed_vocab_size: int

    @property
    def num_orders(self) -> int:
        """Number of n-gram orders, 2 up to ``max_ngram_size``."""
        return self.max_ngram_size - 1

    @property
    def num_columns(self) -> int:
        """Table rows fetched per token: one per order and head, heads inside orders."""
        return self.num_orders * self.n_heads

    @property
    def row_bundle(self) -> int:
        """Values fetched per token, the input width of the Engram projection."""
        return self.num_columns * self.head_dim


@dataclass(frozen=True)
class DraftConfig:
    """The draft blocks that propose several tokens ahead."""

    num_layers: int
    block_size: int
    """Draft length the blocks were trained with; the run-time count is a separate setting."""
    noise_token_id: int
    """Token fed at draft positions whose token is not known yet."""
    target_layer_ids: tuple[int, ...]
    """Backbone layers whose attention input feeds the drafts, increasing."""
    markov_rank: int
    n_routed_experts: int
    num_experts_per_tok: int


@dataclass(frozen=True)
class VisionConfig:
    """The image tower and its aligner."""

    num_hidden_layers: int
    hidden_size: int
    num_attention_heads: int
    intermediate_size: int
    patch_size: int
    rope_theta: float
    downsample_ratio: int
    max_image_tokens: int
    min_pixels: int
    max_wh_ratio: float | None
    """Largest side ratio of an image, or ``None`` for no limit."""


@dataclass(frozen=True)
class ModelConfig:
    """A validated ``config.json``; fields carry the names of the file's keys."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_lora_rank: int
    o_groups: int
    swiglu_limit: float
    rms_norm_eps: float
    max_position_embeddings: int
    rope_theta: float
    compress_rope_theta: float
    rope_scaling: RopeScaling | None
    n_routed_experts: int
    num_experts_per_tok: int
    n_shared_experts: int
    moe_intermediate_size: int
    routed_scaling_factor: float
    sliding_window: int
    compress_ratios: tuple[int, ...]
    """One entry per backbone layer, then one (always 0) per draft block."""
    kv_source_layer_ids: tuple[int, ...]
    index_source_layer_ids: tuple[int, ...]
    index_k_source_layer_ids: tuple[int, ...]
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    candidate_source_layer_id: int | None
    candidate_topk_blocks: int
    """0 when there is no candidate source."""
    candidate_block_size: int
    """0 when there is no candidate source."""
    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float
    engram: EngramConfig | None
    draft: DraftConfig | None
    vision: VisionConfig
    use_fp4_sparse_kv: bool
    bos_token_id: int
    eos_token_id: int
    pad_token_id: int
    image_token_id: int
    tokenizer_compatibility: str
    layers: tuple[LayerSpec, ...]
    """Roles of the backbone layers."""

    @property
    def n_prefill_layer(self) -> int:
        """First ratio-1 layer: the layers from here on run only for the suffix of a prompt."""
        split = first_uncompressed(self.compress_ratios)
        return self.num_hidden_layers if split is None else split

    @property
    def num_draft_layers(self) -> int:
        """Number of draft blocks, 0 without drafts."""
        return 0 if self.draft is None else self.draft.num_layers

    @property
    def softmax_scale(self) -> float:
        """Factor on the attention scores, one over the square root of ``head_dim``."""
        return float(self.head_dim**-0.5)

    @property
    def nope_head_dim(self) -> int:
        """Leading channels of a head that carry no rotary position."""
        return self.head_dim - self.qk_rope_head_dim

    @property
    def hc_mix_width(self) -> int:
        """Outputs of a hyper-connection mixer: ``m`` pre, ``m`` post and ``m * m`` comb values."""
        return self.hc_mult * (self.hc_mult + 2)

    @property
    def hc_width(self) -> int:
        """Input width of a hyper-connection mixer, all streams side by side."""
        return self.hc_mult * self.hidden_size

    @property
    def o_group_width(self) -> int:
        """Attention output channels that enter one group of the output projection."""
        return self.num_attention_heads // self.o_groups * self.head_dim

    @property
    def shared_intermediate_size(self) -> int:
        """Width of the shared expert's hidden layer."""
        return self.n_shared_experts * self.moe_intermediate_size
