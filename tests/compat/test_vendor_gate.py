"""The router: scores, ties, biases, masks, replicas, fixed and random routing."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from deepinfer_neuron.compat.vendor.deep_gemm import bf16_mega_gate
from deepinfer_neuron.compat.vendor.tile_kernels.moe import moe_topk_gate
from deepinfer_neuron.errors import ConfigError
from deepinfer_neuron.ops.expert_gate import gate_scores
from tests.ops.number_formats import normal, wide

SCALING = 2.5


def _score(x: float) -> np.float32:
    return np.float32(math.sqrt(max(x, 0.0) + math.log1p(math.exp(-abs(x)))))


def _plain(logits: Tensor, k: int, bias: np.ndarray) -> tuple[list[list[int]], list[list[float]]]:
    """Experts in rank order and their weights; ``bias`` per token and expert."""
    chosen, weights = [], []
    for row in range(logits.shape[0]):
        u = [_score(float(x)) for x in logits[row]]
        rank = sorted(range(len(u)), key=lambda e: (-np.float32(u[e] + bias[row, e]), e))[:k]
        total = sum(float(u[e]) for e in rank) + 1e-20
        chosen.append(rank)
        weights.append([float(u[e]) / total * SCALING for e in rank])
    return chosen, weights


def _gate(logits: Tensor, k: int, **options) -> tuple[Tensor, Tensor]:
    return moe_topk_gate(logits, k, False, 0, SCALING, options.pop("ep_rank", 0), **options)


def _agrees(actual: tuple[Tensor, Tensor], expected) -> bool:
    index, weight = actual
    assert index.dtype == torch.int64
    assert weight.dtype == torch.float32
    return index.tolist() == expected[0] and np.allclose(
        weight.numpy(), np.array(expected[1]).reshape(weight.shape), rtol=1e-6, atol=0
    )


@pytest.mark.parametrize(("tokens", "experts", "k"), [(9, 24, 6), (1, 8, 8), (0, 8, 2), (5, 7, 1)])
@pytest.mark.parametrize("biased", [True, False])
def test_choice(tokens: int, experts: int, k: int, biased: bool) -> None:
    logits = normal((tokens, experts), 1, torch.float32) * 5
    bias = normal((experts,), 2, torch.float32) if biased else None
    plain = np.zeros(experts, np.float32) if bias is None else bias.numpy()
    expected = _plain(logits, k, np.broadcast_to(plain, (tokens, experts)))
    assert _agrees(_gate(logits, k, bias=bias), expected)


def test_scores_are_rounded_correctly() -> None:
    x = torch.cat((normal((4000,), 3, torch.float32) * 20, torch.tensor([0.0, -100.0, 1e30, -1e4])))
    assert gate_scores(x).tolist() == [_score(v) for v in x.tolist()]


def test_equal_logits_choose_the_first_experts() -> None:
    index, weight = _gate(torch.full((3, 16), 0.5), 4)
    assert index.tolist() == [[0, 1, 2, 3]] * 3
    assert torch.allclose(weight, torch.full((3, 4), SCALING / 4))


def test_huge_biases_decide_and_do_not_enter_the_weights() -> None:
    logits = normal((4, 10), 4, torch.float32)
    bias = torch.zeros(10)
    bias[7], bias[2] = 1e8, -1e8
    index, weight = _gate(logits, 3, bias=bias)
    assert index[:, 0].tolist() == [7] * 4
    assert not (index == 2).any()
    assert torch.allclose(weight.sum(1), torch.full((4,), SCALING))
    own = gate_scores(logits).gather(1, index)
    assert torch.allclose(weight, own / own.sum(1, keepdim=True) * SCALING)


@pytest.mark.parametrize("with_bias", [True, False])
def test_image_tokens_have_their_own_bias(with_bias: bool) -> None:
    logits = normal((6, 8), 5, torch.float32)
    bias, image = normal((8,), 6, torch.float32), normal((8,), 7, torch.float32) * 3
    mask = torch.tensor([True, False, False, True, False, True])
    plain = bias.numpy() if with_bias else np.zeros(8, np.float32)
    per_token = np.where(mask.numpy()[:, None], image.numpy(), plain)
    actual = _gate(
        logits,
        3,
        bias=bias if with_bias else None,
        image_bias=image,
        image_token_mask=mask,
    )
    assert _agrees(actual, _plain(logits, 3, per_token))


def test_masked_tokens_may_hold_anything() -> None:
    logits = normal((4, 8), 8, torch.float32)
    mask = torch.tensor([True, False, True, False])
    expected = _gate(logits, 3)
    logits[1], logits[3, 0] = math.nan, math.inf
    index, weight = _gate(logits, 3, mask=mask)
    assert torch.equal(index[mask], expected[0][mask])
    assert torch.equal(weight[mask], expected[1][mask])
    assert bool((index[~mask] == -1).all())
    assert not weight[~mask].any()
    with pytest.raises(ConfigError, match="mask such tokens out"):
        _gate(logits, 3)


@pytest.mark.parametrize("rank", [0, 3])
def test_replicas(rank: int) -> None:
    logits = normal((300, 6), 9, torch.float32)
    count = torch.tensor([1, 2, 3, 4, 1, 2], dtype=torch.int32)
    table = torch.arange(24, dtype=torch.int32).view(6, 4) * 2
    plain, weights = _gate(logits, 2)
    index, same = _gate(logits, 2, ep_rank=rank, to_physical_map=table, logical_count=count)
    assert torch.equal(same, weights)
    for token in range(300):
        for slot in range(2):
            expert = int(plain[token, slot])
            replica = int(math.fmod(rank + token * 23333, int(count[expert])))
            assert int(index[token, slot]) == int(table[expert, replica])


def test_replicas_of_very_late_tokens_stay_inside() -> None:
    tokens = 92100
    logits = torch.zeros(tokens, 2)
    count = torch.tensor([3, 3], dtype=torch.int32)
    table = torch.arange(8, dtype=torch.int32).view(2, 4)
    index, _ = _gate(logits, 1, to_physical_map=table, logical_count=count)
    assert bool(((index >= 0) & (index < 3)).all())


def test_shared_experts_are_appended() -> None:
    logits = normal((3, 8), 10, torch.float32)
    plain = _gate(logits, 2)
    index, weight = moe_topk_gate(logits, 2, True, 2, SCALING, 0)
    assert torch.equal(index[:, :2], plain[0])
    assert index[:, 2:].tolist() == [[8, 9]] * 3
    assert weight[:, 2:].tolist() == [[1.0, 1.0]] * 3
    table = torch.arange(10, dtype=torch.int32)[:, None] + 50
    mapped, _ = moe_topk_gate(
        logits,
        2,
        True,
        2,
        SCALING,
        0,
        to_physical_map=table,
        logical_count=torch.ones(10, dtype=torch.int32),
    )
    assert torch.equal(mapped, index + 50)


def test_fixed_routing_reads_what_is_stored() -> None:
    logits = normal((5, 8), 11, torch.float32)
    plain, _ = _gate(logits, 2)
    stored = torch.tensor([[7, 1]] * 5)
    fixed = torch.tensor([True, False, True, False, True])
    mask = torch.tensor([True, True, True, False, False])
    index, weight = _gate(logits, 2, mask=mask, fix_routing_mask=fixed, unmapped_topk_idx=stored)
    assert index.tolist() == [[7, 1], plain[1].tolist(), [7, 1], [-1, -1], [-1, -1]]
    assert stored.tolist() == index.tolist()
    own = gate_scores(logits)[0, [7, 1]]
    assert torch.allclose(weight[0], own / own.sum() * SCALING)


def test_random_routing() -> None:
    logits = normal((200, 8), 12, torch.float32)
    drawn = torch.ones(200, dtype=torch.bool)
    drawn[:50] = False
    mask = torch.ones(200, dtype=torch.bool)
    mask[199] = False
    table = torch.arange(16, dtype=torch.int32).view(8, 2)
    count = torch.full((8,), 2, dtype=torch.int32)
    options = {"to_physical_map": table, "logical_count": count}
    plain, _ = _gate(logits, 4, **options)
    index, weight = _gate(logits, 4, mask=mask, force_random=drawn, **options)
    assert torch.equal(index[:50], plain[:50])
    assert bool((weight[50:199] > 0).all())
    assert all(len(set(row)) == 4 for row in index[50:199].tolist())
    assert set(index[50:199].flatten().tolist()) == set(range(16))
    assert index[199].tolist() == [-1] * 4
    with pytest.raises(ConfigError, match="ask for fewer"):
        moe_topk_gate(
            logits[:, :1],
            1,
            True,
            1,
            1.0,
            0,
            force_random=drawn,
            to_physical_map=torch.zeros(2, 1, dtype=torch.int32),
            logical_count=torch.ones(2, dtype=torch.int32),
        )


def test_outputs_are_written_in_place() -> None:
    logits = normal((3, 8), 13, torch.float32)
    buffer = torch.full((3, 6), 9), torch.full((3, 6), 9.0)
    out = buffer[0][:, 1:4], buffer[1][:, 1:4]
    assert _gate(logits, 3, out=out) is out
    expected = _gate(logits, 3)
    assert torch.equal(out[0], expected[0])
    assert torch.equal(out[1], expected[1])
    assert bool((buffer[0][:, [0, 4, 5]] == 9).all())


def test_gate_with_its_product() -> None:
    x, weight = normal((5, 96), 14), normal((12, 96), 15)
    bias = normal((12,), 16, torch.float32) * 0.1
    index, share = bf16_mega_gate(
        x, weight, 3, False, 0, SCALING, 1, scoring_func="sqrtsoftplus", bias=bias
    )
    logits = torch.from_numpy(wide(x) @ wide(weight).T).float()
    expected = _gate(logits, 3, bias=bias)
    assert torch.equal(index, expected[0])
    assert torch.allclose(share, expected[1], rtol=1e-5)
    single = bf16_mega_gate(x, weight.float(), 3, False, 0, SCALING, 1, bias=bias)
    assert torch.equal(single[0], index)


def test_bad_input_is_named() -> None:
    logits = torch.zeros(2, 4)
    with pytest.raises(ConfigError, match="num_topk is 5"):
        _gate(logits, 5)
    with pytest.raises(ConfigError, match="'softmax'"):
        _gate(logits, 2, scoring_func="softmax")
    with pytest.raises(ConfigError, match="bfloat16"):
        _gate(logits.bfloat16(), 2)
    for lonely in ("image_bias", "image_token_mask", "to_physical_map", "logical_count"):
        with pytest.raises(ConfigError, match="belong together"):
            _gate(logits, 2, **{lonely: torch.zeros(4)})
    with pytest.raises(ConfigError, match="fix_routing_mask"):
        _gate(logits, 2, fix_routing_mask=torch.zeros(2, dtype=torch.bool))
