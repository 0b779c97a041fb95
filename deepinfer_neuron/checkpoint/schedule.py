"""Which layer owns which part of the attention, derived from the lists of source layers.

A compressed layer reads the keys and values of the nearest *KV source* at or before it, the index
keys of the nearest *index-K source*, and the selected positions of the nearest *index source*.
The three lists are nested (every KV source is an index-K source, every index-K source an index
source), so a segment of a finer list never straddles two segments of a coarser one.
"""

from __future__ import annotations

import bisect
import enum
from collections.abc import Sequence
from dataclasses import dataclass

from deepinfer_neuron.errors import ConfigError

WINDOW_ONLY = 0
"""Compression ratio of a layer that has no compressed keys at all."""

UNCOMPRESSED = 1
"""Compression ratio of the layers behind the split: one latent entry per token."""


class Role(enum.Enum):
    """What a layer contributes to the compressed attention."""

    SWA = "swa"
    """Sliding window only."""
    FULL = "full"
    """Owns compressor and the complete indexer."""
    REINDEX = "reindex"
    """Owns indexer queries and head weights; it may own index keys, but never the compressor."""
    REUSE = "reuse"
    """Owns nothing; attends to what its sources produced and selected."""


@dataclass(frozen=True)
class LayerSpec:
    """Role and sources of one backbone layer; source ids are layer indices, self when owner."""

    index: int
    role: Role
    ratio: int
    kv_source: int | None
    index_k_source: int | None
    index_source: int | None
    owns_kv: bool
    owns_index_k: bool
    owns_index: bool
    is_candidate_source: bool
    candidate_source: int | None
    """Layer whose candidate blocks bound this layer's own selection, if it has such a bound."""
    engram: int | None
    """Position of this layer in the list of Engram layers."""


@dataclass(frozen=True)
class SourceLists:
    """The lists that define a schedule, each strictly increasing layer indices."""

    ratios: tuple[int, ...]
    """Compression ratio of every backbone layer."""
    kv: tuple[int, ...]
    index_k: tuple[int, ...]
    index: tuple[int, ...]
    candidate: int | None
    engram: tuple[int, ...]


def nearest_source(sources: Sequence[int], layer: int) -> int | None:
    """Largest member of the increasing ``sources`` that is at most ``layer``, if any."""
    position = bisect.bisect_right(sources, layer)
    return sources[position - 1] if position else None


def first_uncompressed(ratios: Sequence[int]) -> int | None:
    """Index of the first layer of ratio 1: from there on only a suffix of a prompt is needed."""
    return next((layer for layer, ratio in enumerate(ratios) if ratio == UNCOMPRESSED), None)


def check_schedule(lists: SourceLists, source: str) -> None:
    """Raise :class:`ConfigError` (naming the file ``source``) unless the schedule is consistent."""
    _check_nesting(lists, source)
    _check_ratios(lists, source)
    _check_split(lists, source)
    _check_candidate(lists, source)


def _check_nesting(lists: SourceLists, source: str) -> None:
    """Every KV source is an index-K source, and every index-K source is an index source."""
    chain = (
        ("kv_source_layer_ids", lists.kv, "index_k_source_layer_ids", lists.index_k),
        ("index_k_source_layer_ids", lists.index_k, "index_source_layer_ids", lists.index),
    )
    for inner_key, inner, outer_key, outer in chain:
        lost = sorted(set(inner) - set(outer))
        if lost:
            # Without its own list the index-K sources are the KV sources.
            named = "kv_source_layer_ids" if lists.index_k == lists.kv else inner_key
            raise ConfigError(
                f"{source}: text_config.{outer_key} lacks the layers {lost} of {named}; "
                f"expected it to contain every layer of {named}."
            )


def _check_ratios(lists: SourceLists, source: str) -> None:
    """Window-only layers come first and own nothing; a KV segment has one ratio."""
    first_kv = lists.kv[0] if lists.kv else len(lists.ratios)
    for layer, ratio in enumerate(lists.ratios):
        where = f"{source}: text_config.compress_ratios[{layer}] is {ratio}"
        if ratio == WINDOW_ONLY:
            if layer in lists.index:
                raise ConfigError(
                    f"{where}, but layer {layer} is a source layer; expected ratio 1 or 2, or "
                    "that the source lists leave it out."
                )
            if layer > first_kv:
                raise ConfigError(
                    f"{where} behind the first KV source {first_kv}; expected layers of ratio 0 "
                    "only before it."
                )
            continue
        owner = nearest_source(lists.kv, layer)
        if owner is None:
            raise ConfigError(
                f"{where}, but no layer at or before it is in kv_source_layer_ids; expected a KV "
                "source of the same ratio."
            )
        if lists.ratios[owner] != ratio:
            raise ConfigError(
                f"{where}, but its KV source is layer {owner} of ratio {lists.ratios[owner]}; "
                "expected one ratio in all layers that share keys."
            )


def _check_split(lists: SourceLists, source: str) -> None:
    """The first layer of ratio 1 is a KV source, and no KV source follows it."""
    split = first_uncompressed(lists.ratios)
    if split is None:
        raise ConfigError(
            f"{source}: text_config.compress_ratios has no layer of ratio 1; expected at least one."
        )
    if split not in lists.kv:
        raise ConfigError(
            f"{source}: text_config.kv_source_layer_ids lacks layer {split}, the first layer of "
            "ratio 1; expected it to be a KV source."
        )
    if lists.kv[-1] != split:
        raise ConfigError(
            f"{source}: text_config.kv_source_layer_ids ends with {lists.kv[-1]}; expected the "
            f"first layer of ratio 1, {split}, to be the last KV source."
        )


def _check_candidate(lists: SourceLists, source: str) -> None:
    """The candidate source selects by itself, and all layers behind it share its ratio."""
    candidate = lists.candidate
    if candidate is None:
        return
    if candidate not in lists.index:
        raise ConfigError(
            f"{source}: text_config.candidate_source_layer_id is {candidate}; expected one of "
            f"index_source_layer_ids {list(lists.index)}, or null."
        )
    ratio = lists.ratios[candidate]
    for layer in range(candidate, len(lists.ratios)):
        if lists.ratios[layer] != ratio:
            raise ConfigError(
                f"{source}: text_config.candidate_source_layer_id is {candidate} of ratio {ratio}, "
                f"but layer {layer} behind it has ratio {lists.ratios[layer]}; expected one ratio."
            )


def derive_layers(lists: SourceLists) -> tuple[LayerSpec, ...]:
    """Roles of all backbone layers for lists that passed :func:`check_schedule`."""
    return tuple(_derive_layer(lists, layer) for layer in range(len(lists.ratios)))


def _derive_layer(lists: SourceLists, layer: int) -> LayerSpec:
    """Role and sources of one layer."""
    compressed = lists.ratios[layer] != WINDOW_ONLY
    owns_kv, owns_index = layer in lists.kv, layer in lists.index
    if owns_kv:
        role = Role.FULL
    elif owns_index:
        role = Role.REINDEX
    else:
        role = Role.REUSE if compressed else Role.SWA
    bounded = owns_index and lists.candidate is not None and layer > lists.candidate
    return LayerSpec(
        index=layer,
        role=role,
        ratio=lists.ratios[layer],
        kv_source=nearest_source(lists.kv, layer) if compressed else None,
        index_k_source=nearest_source(lists.index_k, layer) if compressed else None,
        index_source=nearest_source(lists.index, layer) if compressed else None,
        owns_kv=owns_kv,
        owns_index_k=layer in lists.index_k,
        owns_index=owns_index,
        is_candidate_source=layer == lists.candidate,
        candidate_source=lists.candidate if bounded else None,
        engram=lists.engram.index(layer) if layer in lists.engram else None,
    )
