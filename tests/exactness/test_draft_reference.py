"""The reference of the draft module: against plainer formulas, and what its results depend on.

The engine takes no part here.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from deepinfer_neuron.checkpoint.config import ModelConfig
from deepinfer_neuron.checkpoint.reader import Checkpoint
from deepinfer_neuron.errors import ConfigError, RequestError
from deepinfer_neuron.reference import (
    DraftBlock,
    Drafts,
    LayerTrace,
    Network,
    PlainPrimitives,
    Rounding,
    Trace,
    greedy_tokens,
)
from deepinfer_neuron.reference.weights import Weights
from tests.conftest import CheckpointDir, OpenCheckpoint

IDS = [(37 * k * k + 11 * k + 5) % 512 for k in range(21)]
GOLDEN, POSITION = IDS[-1], len(IDS) - 1
FORCED = [7, 101, 33, 250, 480]


class Changed(Checkpoint):
    """A checkpoint in which the tensors of some names read differently."""

    changes: dict[str, Callable[[Tensor], Tensor]]

    def tensor(self, name: str) -> Tensor:
        """A changed copy where there is a change."""
        values = super().tensor(name)
        change = self.changes.get(name)
        return values if change is None else change(values.clone())


class FineSums(PlainPrimitives):
    """Sums in fp64, rounded once."""

    def matmul(self, x: Tensor, w: Tensor) -> Tensor:
        """``[..., M, K] x [..., N, K] -> [..., M, N]``."""
        return (x.double() @ w.double().transpose(-1, -2)).float()

    def matmul_wide(self, x: Tensor, w: Tensor) -> Tensor:
        """The same."""
        return self.matmul(x, w)

    def sum(self, x: Tensor) -> Tensor:
        """Sum of the last axis."""
        return x.double().sum(-1).float()

    def weighted_sum(self, weights: Tensor, values: Tensor) -> Tensor:
        """Weighted sum of the keys."""
        return (weights.double() @ values.double()).float()


@dataclass(frozen=True)
class Logged(Rounding):
    """Writes down which rounding point was passed."""

    log: list[str] = field(default_factory=list)

    def bf16(self, x: Tensor) -> Tensor:
        """One of the many."""
        self.log.append("bf16")
        return super().bf16(x)

    def activation(self, x: Tensor) -> Tensor:
        """Groups of 32."""
        self.log.append("e4m3")
        return super().activation(x)


@pytest.fixture(scope="module")
def drafts(open_checkpoint: OpenCheckpoint) -> Drafts:
    """Every rounding point, branches as strong as the trunk."""
    return Drafts(Network(open_checkpoint("nano", wild=True)))


@pytest.fixture(scope="module")
def unrounded(open_checkpoint: OpenCheckpoint) -> Drafts:
    """The same without rounding."""
    return Drafts(Network(open_checkpoint("nano", wild=True), Rounding(enabled=False)))


@pytest.fixture(scope="module")
def changed(checkpoint_dir: CheckpointDir) -> Iterator[Callable[..., Drafts]]:
    """Makes drafts of the same checkpoint with other tensors: ``changed({name: change})``."""
    with Changed.open(checkpoint_dir("nano", wild=True)) as checkpoint:

        def make(changes: dict[str, Callable[[Tensor], Tensor]]) -> Drafts:
            assert isinstance(checkpoint, Changed)
            checkpoint.changes = changes
            return Drafts(Network(checkpoint))

        yield make


@pytest.fixture(scope="module")
def main(drafts: Drafts) -> list[Tensor]:
    """Main keys of everything before the golden token."""
    return main_of(drafts)


def main_of(drafts: Drafts, ids: list[int] = IDS) -> list[Tensor]:
    trace = Trace()
    drafts.network.logits(ids[:-1], trace)
    return drafts.main_keys(drafts.features(trace), torch.arange(len(ids) - 1))


def hidden_of(drafts: Drafts, main: list[Tensor], ids: list[int]) -> Tensor:
    return drafts.hidden(ids, POSITION, main, Trace())


def moved(a: Tensor, b: Tensor) -> list[bool]:
    """Which rows differ."""
    return (a != b).flatten(1).any(1).tolist()


def distance(a: Tensor, b: Tensor) -> float:
    """Largest relative distance of two rows."""
    a, b = a.double().flatten(1), b.double().flatten(1)
    return float(((a - b).norm(dim=1) / b.norm(dim=1)).max())


# Plain formulas in fp64, loops over queries and tokens.


@dataclass(frozen=True)
class PlainLayer:
    """A draft layer without rounding; positions are those of the block's rows."""

    config: ModelConfig
    weights: Weights
    positions: range

    def wide(self, name: str) -> Tensor:
        """A stored tensor."""
        return self.weights.plain(name).double()

    def norm(self, x: Tensor, name: str) -> Tensor:
        """RMS norm; the epsilon is too small to count."""
        return x / x.square().mean(-1, keepdim=True).sqrt() * self.wide(name)

    def turn(self, x: Tensor, position: int, sign: int = 1) -> Tensor:
        """RoPE as complex numbers: ``[..., Dh]`` at one position."""
        width = self.config.qk_rope_head_dim
        pair = torch.arange(width // 2, dtype=torch.float64)
        angle = sign * position / self.config.rope_theta ** (2 * pair / width)
        turning = torch.view_as_complex(x[..., -width:].unflatten(-1, (-1, 2)).contiguous())
        turned = torch.view_as_real(turning * torch.polar(torch.ones_like(angle), angle))
        return torch.cat((x[..., :-width], turned.flatten(-2)), -1)

    def key(self, x: Tensor, position: int) -> Tensor:
        """Key of one row: ``[D]`` to ``[Dh]``."""
        kv = self.weights.fp8("attn.wkv").double() @ x
        return self.turn(self.norm(kv, "attn.kv_norm.weight"), position)

    def attention(self, x: Tensor, main: Tensor) -> Tensor:
        """``[n, D]`` to ``[n, D]``: every query over window and block, both ways."""
        c, w = self.config, self.weights
        window = main[max(0, len(main) - c.sliding_window) :].double()
        keys = [*window, *(self.key(row, p) for row, p in zip(x, self.positions, strict=True))]
        sink, rows = self.wide("attn.attn_sink"), []
        for row, position in zip(x, self.positions, strict=True):
            latent = self.norm(w.fp8("attn.wq_a").double() @ row, "attn.q_norm.weight")
            query = (w.fp8("attn.wq_b").double() @ latent).view(-1, c.head_dim)
            heads = []
            for head, q in enumerate(self.turn(query, position)):
                share = [math.exp(float(q @ key) / math.sqrt(c.head_dim)) for key in keys]
                total = sum(share) + math.exp(float(sink[head]))
                value = sum(a * key for a, key in zip(share, keys, strict=True)) / total
                heads.append(self.turn(value, position, -1))
            grouped = torch.cat(heads).view(c.o_groups, -1)
            wo_a = w.fp8("attn.wo_a").double().view(c.o_groups, c.o_lora_rank, -1)
            out = torch.cat([wo_a[g] @ grouped[g] for g in range(c.o_groups)])
            rows.append(w.fp8("attn.wo_b").double() @ out)
        return torch.stack(rows)

    def experts(self, x: Tensor) -> Tensor:
        """``[n, D]`` to ``[n, D]``: the shared expert and the draft module's number of others."""
        c, w = self.config, self.weights.below("ffn.")
        assert c.draft is not None

        def expert(y: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
            a = (gate.double() @ y).clamp(max=c.swiglu_limit)
            b = (up.double() @ y).clamp(-c.swiglu_limit, c.swiglu_limit)
            return down.double() @ (a * a.sigmoid() * b)

        rows = []
        for y in x:
            score = torch.log1p((w.plain("gate.weight").double() @ y).exp()).sqrt()
            chosen = (score + w.plain("gate.bias")).topk(c.draft.num_experts_per_tok).indices
            out = expert(y, *(w.fp8(f"shared_experts.{m}") for m in ("w1", "w3", "w2")))
            for e in chosen.tolist():
                share = score[e] / score[chosen].sum() * c.routed_scaling_factor
                matrices = [w.fp4(f"experts.{e}.{m}") for m in ("w1", "w3", "w2")]
                out = out + share * expert(y, *matrices)
            rows.append(out)
        return torch.stack(rows)

    def site(self, name: str, trunk: Tensor, pre: Tensor, block: Callable) -> tuple[Tensor, Tensor]:
        """One hyper-connection site: the trunk behind it and its mix."""
        m, eps = self.config.hc_mult, self.config.hc_eps
        flat = trunk.flatten(1)
        z = flat @ self.wide(f"hc_{name}_fn").T / flat.square().mean(1, keepdim=True).sqrt()
        scale, base = self.wide(f"hc_{name}_scale"), self.wide(f"hc_{name}_base")
        z = z * torch.cat([scale[i].expand(k) for i, k in enumerate((m, m, m * m))]) + base
        comb = z[:, 2 * m :].view(-1, m, m).softmax(2) + eps
        comb = comb / (comb.sum(1, keepdim=True) + eps)
        for _ in range(self.config.hc_sinkhorn_iters - 1):
            comb = comb / (comb.sum(2, keepdim=True) + eps)
            comb = comb / (comb.sum(1, keepdim=True) + eps)
        x = torch.einsum("nm,nmd->nd", pre, trunk)
        out = block(self.norm(x, f"{name}_norm.weight"))
        expanded = 2 * z[:, m : 2 * m].sigmoid()[..., None] * out[:, None]
        return expanded + torch.einsum("nij,nid->njd", comb, trunk), z[:, :m].sigmoid() + eps


@pytest.fixture(scope="module")
def plain_run(unrounded: Drafts) -> tuple[DraftBlock, list[Tensor]]:
    main = main_of(unrounded)
    return unrounded.draft(GOLDEN, POSITION, main, 5, FORCED, [1.0, 2.0, 1.0, 0.5, 1.0]), main


def test_features_are_means_of_the_trunk(open_checkpoint: OpenCheckpoint) -> None:
    """Taken behind the Engram update of the target layer and before anything else of it."""
    checkpoint = copy.copy(open_checkpoint("nano", wild=True))
    draft = dataclasses.replace(checkpoint.config.draft, target_layer_ids=(1, 2))
    checkpoint.config = dataclasses.replace(checkpoint.config, draft=draft)
    network, trace = Network(checkpoint), Trace()
    network.logits(IDS, trace)
    features = Drafts(network).features(trace).split(network.config.hidden_size, 1)

    rows = network._engram_rows(torch.tensor(IDS))[0]
    updated, _ = network.engram(Weights(checkpoint, "layers.1."), trace.layers[1].trunk_in, rows)
    for found, trunk in zip(features, (updated, trace.layers[1].trunk_out), strict=True):
        mean = trunk.double().mean(1).to(torch.bfloat16).float()
        assert torch.equal(found, mean)
    assert all(moved(features[0], trace.layers[0].trunk_out.mean(1).bfloat16().float()))


def test_main_keys_follow_the_plain_formula(unrounded: Drafts) -> None:
    trace, network = Trace(), unrounded.network
    network.logits(IDS[:-1], trace)
    targets = network.config.draft.target_layer_ids
    mean = torch.cat([trace.layers[t].entered.double().mean(1) for t in targets], 1)
    first = PlainLayer(network.config, Weights(network.checkpoint, "mtp.0."), range(0))
    x = mean @ first.weights.fp8("main_proj").double().T
    y = first.norm(x, "main_norm.weight")
    found = main_of(unrounded)
    assert len(found) == network.config.num_draft_layers
    for index, keys in enumerate(found):
        weights = Weights(network.checkpoint, f"mtp.{index}.")
        layer = PlainLayer(network.config, weights, range(0))
        expected = torch.stack([layer.key(row, p) for p, row in enumerate(y)])
        assert distance(keys, expected) < 1e-5


@pytest.mark.parametrize("index", [0, 1])
def test_a_layer_follows_the_plain_formula(
    plain_run: tuple[DraftBlock, list[Tensor]], unrounded: Drafts, index: int
) -> None:
    block, main = plain_run
    network, record = unrounded.network, block.trace.layers[index]
    weights = Weights(network.checkpoint, f"mtp.{index}.")
    layer = PlainLayer(network.config, weights, range(POSITION, POSITION + 5))
    trunk, pre = layer.site(
        "attn",
        record.trunk_in.double(),
        record.pre_in.double(),
        lambda x: layer.attention(x, main[index]),
    )
    assert distance(record.trunk_after_attention, trunk) < 1e-5
    assert distance(record.pre_after_attention, pre) < 1e-5
    trunk, pre = layer.site("ffn", trunk, pre, layer.experts)
    assert distance(record.trunk_out, trunk) < 1e-5
    assert distance(record.pre_out, pre) < 1e-5


def test_the_block_enters_as_embeddings(
    plain_run: tuple[DraftBlock, list[Tensor]], unrounded: Drafts
) -> None:
    record, checkpoint = plain_run[0].trace.layers[0], unrounded.network.checkpoint
    noise = unrounded.config.noise_token_id
    embedding = checkpoint.tensor("embed.weight").float()[[GOLDEN] + [noise] * 4]
    for stream in range(unrounded.network.config.hc_mult):
        assert torch.equal(record.trunk_in[:, stream], embedding)
    assert torch.equal(record.pre_in, torch.eye(4)[:1].expand(5, 4))


def test_the_heads_follow_the_plain_formula(
    plain_run: tuple[DraftBlock, list[Tensor]], unrounded: Drafts
) -> None:
    """The bias and the confidence take the token before; the confidence skips the norm."""
    block, checkpoint = plain_run[0], unrounded.network.checkpoint
    last: LayerTrace = block.trace.layers[-1]
    hidden = torch.einsum("nm,nmd->nd", last.pre_out.double(), last.trunk_out.double())
    assert distance(block.hidden, hidden) < 1e-6
    weights = Weights(checkpoint, f"mtp.{unrounded.config.num_layers - 1}.")
    e = weights.plain("markov_head.embed.weight").double()[[GOLDEN, *FORCED[:4]]]
    normed = hidden / hidden.square().mean(1, keepdim=True).sqrt() * weights.plain("norm.weight")
    logits = normed @ checkpoint.tensor("head.weight").double().T
    logits = logits + e @ weights.plain("markov_head.head.weight").double().T
    assert distance(block.logits, logits) < 1e-5
    score = torch.cat((hidden, e), 1) @ weights.plain("confidence_head.proj.weight")[0].double()
    expected = (score / torch.tensor([1.0, 2.0, 1.0, 0.5, 1.0])).sigmoid()
    assert float((block.confidence - expected).abs().max()) < 1e-5


# What a result depends on.


def test_a_row_sees_the_rows_behind_it(drafts: Drafts, main: list[Tensor]) -> None:
    ids = [GOLDEN] + [drafts.config.noise_token_id] * 4
    usual = hidden_of(drafts, main, ids)
    for place in range(5):
        other = [*ids[:place], 9, *ids[place + 1 :]]
        assert all(moved(usual, hidden_of(drafts, main, other)))


def test_a_longer_block_changes_its_first_rows(drafts: Drafts) -> None:
    blocks = [drafts.block(IDS, nextn, FORCED[:nextn]) for nextn in (3, 4)]
    assert all(moved(blocks[0].hidden, blocks[1].hidden[:3]))


def test_the_window_ends_before_the_golden_token(drafts: Drafts, main: list[Tensor]) -> None:
    """The last ``W`` main keys count and no others, for the last row as well as for the first."""
    window = drafts.network.config.sliding_window
    usual = drafts.draft(GOLDEN, POSITION, main, 5).hidden
    for position in range(POSITION):
        other = [keys.clone() for keys in main]
        for keys in other:
            keys[position] = -keys[position]
        found = drafts.draft(GOLDEN, POSITION, other, 5).hidden
        assert moved(usual, found) == [position >= POSITION - window] * 5, position


def test_every_layer_has_its_own_main_keys(drafts: Drafts, main: list[Tensor]) -> None:
    first, second = main
    usual = hidden_of(drafts, main, [GOLDEN])
    assert any(moved(first, second))
    for other in ([second, second], [first, first]):
        assert all(moved(usual, hidden_of(drafts, other, [GOLDEN])))


def test_main_keys_depend_on_their_own_position_only(drafts: Drafts) -> None:
    fine = Drafts(Network(drafts.network.checkpoint, ops=FineSums()))
    trace = Trace()
    fine.network.logits(IDS, trace)
    features, position = fine.features(trace), torch.arange(len(IDS))
    together = fine.main_keys(features, position)
    for row in (0, 7, 20):
        alone = fine.main_keys(features[row : row + 1], position[row : row + 1])
        elsewhere = fine.main_keys(features[row : row + 1], position[row : row + 1] + 1)
        still = fine.network.config.nope_head_dim // 32 * 32
        for keys, same, turned in zip(together, alone, elsewhere, strict=True):
            assert torch.equal(keys[row : row + 1], same)
            assert torch.equal(same[:, :still], turned[:, :still])
            assert not torch.equal(same, turned)


def test_the_golden_token_has_no_main_key(drafts: Drafts, main: list[Tensor]) -> None:
    """A block is what the module makes of the prefix without its last token."""
    whole = drafts.block(IDS, 5)
    parts = drafts.draft(GOLDEN, POSITION, main, 5)
    assert torch.equal(whole.logits, parts.logits)
    assert torch.equal(whole.confidence, parts.confidence)


def test_the_position_of_a_block_counts_against_its_main_keys(
    drafts: Drafts, main: list[Tensor]
) -> None:
    shifted = drafts.hidden([GOLDEN] * 3, POSITION + 1, main, Trace())
    assert all(moved(drafts.hidden([GOLDEN] * 3, POSITION, main, Trace()), shifted))


# The chain of drafts.


def test_drafts_are_the_likeliest_tokens(drafts: Drafts) -> None:
    free = drafts.block(IDS, 5)
    assert free.tokens.tolist() == [row.tolist().index(row.max()) for row in free.logits]
    forced = drafts.block(IDS, 5, free.tokens.tolist())
    assert torch.equal(forced.logits, free.logits)
    assert torch.equal(forced.confidence, free.confidence)


def test_a_forced_token_changes_the_next_row_only(drafts: Drafts, main: list[Tensor]) -> None:
    usual = drafts.draft(GOLDEN, POSITION, main, 5, FORCED)
    for place in range(5):
        forced = [*FORCED[:place], 12, *FORCED[place + 1 :]]
        other = drafts.draft(GOLDEN, POSITION, main, 5, forced)
        expected = [row == place + 1 for row in range(5)]
        assert moved(usual.logits, other.logits) == expected
        assert moved(usual.confidence[:, None], other.confidence[:, None]) == expected
        assert torch.equal(usual.hidden, other.hidden)


def test_the_markov_embedding_of_a_draft_acts_on_later_rows(
    drafts: Drafts, main: list[Tensor], changed: Callable[..., Drafts]
) -> None:
    def negate(token: int) -> Callable[[Tensor], Tensor]:
        def change(table: Tensor) -> Tensor:
            table[token] = -table[token]
            return table

        return change

    last = f"mtp.{drafts.config.num_layers - 1}.markov_head"
    usual = drafts.draft(GOLDEN, POSITION, main, 5, FORCED)
    for place, token in enumerate([GOLDEN, *FORCED]):
        other = changed({f"{last}.embed.weight": negate(token)})
        found = other.draft(GOLDEN, POSITION, main, 5, FORCED).logits
        assert moved(usual.logits, found) == [row == place for row in range(5)]
    other = changed({f"{last}.head.weight": negate(3)})
    found = other.draft(GOLDEN, POSITION, main, 5, FORCED).logits
    assert (found != usual.logits).any(0).nonzero().flatten().tolist() == [3]


def test_equal_logits_give_the_lowest_token(changed: Callable[..., Drafts]) -> None:
    """All logits are zero without the last norm and the bias."""
    zero = dict.fromkeys(["mtp.1.norm.weight", "mtp.1.markov_head.head.weight"], torch.zeros_like)
    assert changed(zero).block([5], 3).tokens.tolist() == [0, 0, 0]


# Confidence.


def test_confidence_is_clamped(drafts: Drafts, main: list[Tensor]) -> None:
    """Temperatures below the smallest one push every score beyond the clamp."""
    found = set()
    for golden in range(20):
        usual = drafts.draft(golden, POSITION, main, 3).confidence
        cold = drafts.draft(golden, POSITION, main, 3, temperatures=0.0).confidence
        for before, after in zip(usual.tolist(), cold.tolist(), strict=True):
            sure = before > 0.5
            assert after == 1.0 if sure else after == pytest.approx(math.exp(-60), rel=1e-5, abs=0)
            found.add(sure)
    assert found == {True, False}


def test_the_smallest_temperature_divides(changed: Callable[..., Drafts]) -> None:
    """A temperature of zero is that one, seen on scores too small to reach the clamp."""
    other = changed({"mtp.1.confidence_head.proj.weight": lambda w: w * 2.0**-20})
    zero, smallest = (other.block([5], 3, temperatures=t).confidence for t in (0.0, 1e-5))
    assert torch.equal(zero, smallest)
    assert not torch.equal(zero, other.block([5], 3, temperatures=2e-5).confidence)


def test_each_draft_has_its_temperature(drafts: Drafts, main: list[Tensor]) -> None:
    usual = drafts.draft(GOLDEN, POSITION, main, 3).confidence
    found = drafts.draft(GOLDEN, POSITION, main, 3, temperatures=[1.0, 2.0, 4.0]).confidence
    torch.testing.assert_close(found.logit(), usual.logit() / torch.tensor([1.0, 2.0, 4.0]))


def test_a_huge_score_is_no_exception(changed: Callable[..., Drafts]) -> None:
    name = "mtp.1.confidence_head.proj.weight"
    for sign, expected in ((1, 1.0), (-1, math.exp(-60))):
        other = changed({name: lambda w, sign=sign: w.sign() * sign * 2.0**100})
        hidden = other.network.checkpoint.tensor(name)[:, :-32].sign().float() * sign
        block = other.heads(hidden, 3, None, 1.0, Trace())
        assert block.confidence.tolist() == pytest.approx([expected], rel=1e-5, abs=0)


# Rounding points.


def test_rounding_points_of_keys_and_heads(drafts: Drafts) -> None:
    rounding = Logged()
    logged = Drafts(Network(drafts.network.checkpoint, rounding))
    trace = Trace()
    logged.network.logits(IDS, trace)
    rounding.log.clear()
    features = logged.features(trace)
    assert rounding.log == ["bf16"] * 2
    rounding.log.clear()
    logged.main_keys(features, torch.arange(len(IDS)))
    shared, each = ["e4m3", "bf16", "bf16", "e4m3"], ["bf16", "bf16", "bf16", "e4m3"]
    assert rounding.log == shared + 2 * each
    rounding.log.clear()
    logged.heads(torch.ones(3, logged.network.config.hidden_size), 3, None, 1.0, Trace())
    assert rounding.log == ["bf16"]


def test_values_lie_on_their_grids(drafts: Drafts, main: list[Tensor]) -> None:
    rounding, block = drafts.network.rounding, drafts.draft(GOLDEN, POSITION, main, 5, FORCED)
    for keys in main:
        assert torch.equal(rounding.activation(keys), keys)
    assert torch.equal(rounding.bf16(block.hidden), block.hidden)
    for record in block.trace.layers:
        for trunk in (record.trunk_after_attention, record.trunk_out):
            assert torch.equal(rounding.bf16(trunk), trunk)
    same_bias = drafts.draft(GOLDEN, POSITION, main, 5, [GOLDEN] * 5).logits
    assert float((rounding.bf16(same_bias) != same_bias).float().mean()) > 0.9


def test_block_keys_are_quantized(drafts: Drafts, main: list[Tensor]) -> None:
    """Both kinds of keys pass e4m3 before a query reads them; queries do not."""
    read: list[Tensor] = []

    class Reading(PlainPrimitives):
        def weighted_sum(self, weights: Tensor, values: Tensor) -> Tensor:
            read.append(values)
            return super().weighted_sum(weights, values)

    reading = Drafts(Network(drafts.network.checkpoint, ops=Reading()))
    reading.draft(GOLDEN, POSITION, main, 5)
    window = drafts.network.config.sliding_window
    for layer, keys in enumerate(read[: 2 * 5 * 2 : 2 * 5]):
        assert torch.equal(keys[:window], main[layer][-window:])
        assert len(keys) == window + 5
        assert torch.equal(drafts.network.rounding.activation(keys), keys)


def test_the_order_of_sums_can_be_replaced(unrounded: Drafts) -> None:
    network = dataclasses.replace(unrounded.network, ops=FineSums())
    mine, fine = (d.block(IDS, 5, FORCED) for d in (unrounded, Drafts(network)))
    assert 0 < distance(mine.logits, fine.logits) < 1e-4
    assert torch.equal(mine.tokens, fine.tokens)


# Sizes and refusals.


@pytest.mark.parametrize("nextn", range(1, 8))
@pytest.mark.parametrize("length", [1, 2, 9])
def test_any_number_of_drafts(drafts: Drafts, length: int, nextn: int) -> None:
    block, config = drafts.block(IDS[:length], nextn), drafts.network.config
    assert block.tokens.dtype == torch.int64
    assert block.tokens.shape == block.confidence.shape == (nextn,)
    assert block.logits.shape == (nextn, config.vocab_size)
    assert block.hidden.shape == (nextn, config.hidden_size)
    assert block.logits.isfinite().all()
    assert bool(((block.confidence > 0) & (block.confidence <= 1)).all())
    assert len(block.trace.layers) == config.num_draft_layers
    assert block.trace.layers[0].route.shape == (nextn, config.draft.num_experts_per_tok)


def test_refusals(drafts: Drafts, open_checkpoint: OpenCheckpoint) -> None:
    for arguments in (
        ([], 1), ([512], 1), ([5], 0), ([5], 3, [1, 2]), ([5], 2, [1, 512]),
        ([5], 3, None, [1.0, 1.0]), ([5], 1, None, []),
    ):  # fmt: skip
        with pytest.raises(RequestError):
            drafts.block(*arguments)
    checkpoint = copy.copy(open_checkpoint("nano"))
    checkpoint.config = dataclasses.replace(checkpoint.config, draft=None)
    with pytest.raises(ConfigError, match="draft layers"):
        Drafts(Network(checkpoint))


def test_greedy_tokens_are_the_likeliest(open_checkpoint: OpenCheckpoint) -> None:
    network = Network(open_checkpoint("nano"))
    found = greedy_tokens(network, IDS[:6], 4)
    best = network.logits(IDS[:6] + found).argmax(1).tolist()
    assert found == best[5:-1]
    assert greedy_tokens(network, IDS[:6], 0) == []
