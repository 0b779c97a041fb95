"""Choice of experts and their weights from logits.

With ``u = sqrt(softplus(logit))``, a token takes the experts of the ``num_topk`` largest
``u + bias``, the lowest index first among equals. Weights are ``u / (sum of the chosen u + 1e-20) *
routed_scaling_factor``, in rank order.

| argument | type | meaning |
|---|---|---|
| ``logits`` | fp32 ``[T, E]`` | finite where ``mask`` is true |
| ``num_topk`` | | experts per token |
| ``use_shared_as_routed``, ``num_shared_experts`` | | append experts ``E``, ... of weight 1 |
| ``routed_scaling_factor`` | | sum of the weights |
| ``ep_rank`` | | turns the choice among replicas |
| ``scoring_func`` | | only ``"sqrtsoftplus"`` |
| ``mask`` | bool ``[T]`` | a token that is false gets experts -1 and weights 0 |
| ``bias`` | fp32 ``[E]`` | for the selection only |
| ``image_bias`` | fp32 ``[E]`` | in its place where ``image_token_mask`` is true |
| ``image_token_mask`` | bool ``[T]`` | |
| ``fix_routing_mask`` | bool ``[T]`` | true takes the experts from ``unmapped_topk_idx`` |
| ``to_physical_map`` | int32 ``[E, R]`` | replicas of each expert, shared ones included |
| ``logical_count`` | int32 ``[E]`` | replicas in use |
| ``unmapped_topk_idx`` | int64 ``[T, num_topk]`` | read if routing is fixed, else written |
| ``force_random`` | bool ``[T]`` | true gives distinct random physical experts |
| ``out`` | int64, fp32 ``[T, k]`` | to write into |

``unmapped_topk_idx`` is written with the experts before the mapping, -1 for a token that is masked
or random.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer_neuron.compat.vendor.operands import require, shape
from deepinfer_neuron.ops.expert_gate import Replicas, gate_scores, random_choice
from deepinfer_neuron.ops.moe import choose, shares


def moe_topk_gate(
    logits: Tensor,
    num_topk: int,
    use_shared_as_routed: bool,
    num_shared_experts: int,
    routed_scaling_factor: float,
    ep_rank: int,
    scoring_func: str = "sqrtsoftplus",
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    image_bias: Tensor | None = None,
    image_token_mask: Tensor | None = None,
    fix_routing_mask: Tensor | None = None,
    to_physical_map: Tensor | None = None,
    logical_count: Tensor | None = None,
    unmapped_topk_idx: Tensor | None = None,
    force_random: Tensor | None = None,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Experts int64 ``[T, k]`` and weights fp32 ``[T, k]``; ``out`` if given.

    The module's docstring explains the arguments.
    """
    _check(logits, num_topk, scoring_func)
    _check_pairs(image_bias, image_token_mask, "image_bias", "image_token_mask")
    _check_pairs(to_physical_map, logical_count, "to_physical_map", "logical_count")
    require(
        fix_routing_mask is None or unmapped_topk_idx is not None,
        "moe_topk_gate: fix_routing_mask needs the experts in unmapped_topk_idx; give both.",
    )
    tokens, experts = logits.shape
    active = _flags(mask, tokens, True, logits)
    drawn = _flags(force_random, tokens, False, logits)
    require(
        bool(logits[active].isfinite().all()),
        "moe_topk_gate: logits of tokens in use hold infinity or NaN; mask such tokens out.",
    )
    scores = gate_scores(logits.masked_fill(~active[:, None], 0.0))
    chosen = choose(scores, _biases(bias, image_bias, image_token_mask), num_topk)
    _fix(chosen, unmapped_topk_idx, fix_routing_mask, active & ~drawn)
    weights = shares(scores, chosen, routed_scaling_factor)
    shared = num_shared_experts if use_shared_as_routed else 0
    extra = torch.arange(experts, experts + shared, device=logits.device)
    chosen = torch.cat((chosen, extra.expand(tokens, -1)), dim=1)
    weights = torch.cat((weights, weights.new_ones(tokens, shared)), dim=1)
    physical = experts + shared
    if to_physical_map is not None and logical_count is not None:
        replicas = Replicas(to_physical_map, logical_count, ep_rank)
        chosen, physical = replicas.place(chosen), replicas.experts()
    if force_random is not None:
        any_expert, any_weight = random_choice(tokens, physical, chosen.shape[1], logits)
        chosen = torch.where(drawn[:, None], any_expert, chosen)
        weights = torch.where(drawn[:, None], any_weight, weights)
    chosen = chosen.masked_fill(~active[:, None], -1)
    weights = weights.masked_fill(~active[:, None], 0.0)
    if out is None:
        return chosen, weights
    out[0].copy_(chosen)
    out[1].copy_(weights)
    return out


def _flags(given: Tensor | None, tokens: int, default: bool, like: Tensor) -> Tensor:
    """bool ``[T]``, ``default`` throughout if nothing is given."""
    if given is None:
        return torch.full((tokens,), default, device=like.device)
    return given.reshape(-1)


def _biases(bias: Tensor | None, image: Tensor | None, is_image: Tensor | None) -> Tensor | None:
    """What is added for the selection: ``None``, ``[E]`` or ``[T, E]``."""
    if image is None or is_image is None:
        return bias
    other = torch.zeros_like(image) if bias is None else bias
    return torch.where(is_image[:, None], image, other)


def _check_pairs(first: object, second: object, *names: str) -> None:
    require(
        (first is None) == (second is None),
        f"moe_topk_gate: {names[0]} and {names[1]} belong together; give both or none.",
    )


def _check(logits: Tensor, num_topk: int, scoring_func: str) -> None:
    require(
        logits.dim() == 2
        and logits.dtype == torch.float32
        and 1 <= num_topk <= logits.shape[1]
        and scoring_func == "sqrtsoftplus",
        f"moe_topk_gate: logits are {shape(logits)}, num_topk is {num_topk}, scoring_func is "
        f"{scoring_func!r}; give float32 [T, E] with num_topk of at most E and 'sqrtsoftplus'.",
    )


def _fix(chosen: Tensor, stored: Tensor | None, fixed: Tensor | None, regular: Tensor) -> None:
    """Exchange experts with ``stored``: read where routing is fixed, written elsewhere."""
    if stored is None:
        return
    kept = torch.zeros_like(regular) if fixed is None else fixed & regular
    chosen[kept] = stored[kept]
    stored.copy_(torch.where(regular[:, None], chosen, -1))
