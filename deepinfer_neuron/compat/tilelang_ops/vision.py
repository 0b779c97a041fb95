"""Patches of images, their embeddings among the tokens, and their reduction."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from deepinfer_neuron.errors import ConfigError
from deepinfer_neuron.ops.image_patches import (
    PatchGrids,
    RawImages,
    concatenate_cells,
    pixel_values,
    place_embeddings,
    pool_cells,
    square_cells,
    write_patches,
)

_WORKSPACE_ELEMENTS = 1 << 19
"""Channels merged at once, so that intermediates stay in cache."""


@cache
def rgb_pad_to_patches_tl(patch_size: int) -> Callable[..., None]:
    """Centre images in their grids, normalize them, and cut them into patches.

    Kernel: ``raw [bytes] u8``, ``cu_raw_bytes [n+1] i64``, ``real_sizes [n, 2] i32`` (width,
    height), ``spatial_crop [n, 2] i32`` (patches), ``cu_seqlens_vit [n+1] i32``, ``mean``, ``std``,
    ``pad_color`` floats, ``-> out [P, 3, patch_size, patch_size] bf16``.
    """
    if patch_size < 1:
        raise ConfigError(f"rgb_pad_to_patches: patch_size is {patch_size}, it must be positive")
    # Callers give the same mean and deviation every time.
    values_of = cache(pixel_values)

    def kernel(
        raw: Tensor,
        cu_raw_bytes: Tensor,
        real_sizes: Tensor,
        spatial_crop: Tensor,
        cu_seqlens_vit: Tensor,
        mean: float,
        std: float,
        pad_color: float,
        out: Tensor,
    ) -> None:
        images = RawImages(raw, cu_raw_bytes, real_sizes, spatial_crop, cu_seqlens_vit)
        values = values_of(mean, std).to(out.device)
        write_patches(out, images, patch_size, values, int(pad_color))

    return kernel


@cache
def replace_input_embeds_tl(hidden: int) -> Callable[..., None]:
    """Put image embeddings and padding embeddings in the places of their tokens.

    Kernel: ``<-> input_embeds [T, hidden] bf16``, ``input_ids [T] i32``,
    ``images_embeds [I, hidden] bf16``, ``image_token_id`` int, ``image_token_offset [T] i32``
    (image tokens up to and including this one), ``pad_ids [p] i32``,
    ``pad_embeds [p, hidden] bf16``.
    """
    if hidden < 1:
        raise ConfigError(f"replace_input_embeds: hidden is {hidden}, it must be positive")

    def kernel(
        input_embeds: Tensor,
        input_ids: Tensor,
        images_embeds: Tensor,
        image_token_id: int,
        image_token_offset: Tensor,
        pad_ids: Tensor,
        pad_embeds: Tensor,
    ) -> None:
        place_embeddings(
            input_embeds,
            input_ids,
            images_embeds,
            image_token_id,
            image_token_offset,
            pad_ids,
            pad_embeds,
        )

    return kernel


@cache
def batch_downsample_tl(
    downsample_ratio: int, dim: int, do_downsample: bool, dtype: torch.dtype
) -> Callable[..., None]:
    """Merge squares of patches: their mean with ``do_downsample``, else their concatenation.

    Kernel: ``features [P, dim]``, ``images_id [N] i64``, ``spatial_crop [n, 2] i64`` (width,
    height), ``cu_seqlen_downsp [n+1] i64``, ``cu_seqlen [n+1] i64``,
    ``-> concat [N, dim, ratio, ratio]``, ``-> pooled [N, dim]``, of which one may be ``None``.
    """
    if downsample_ratio < 1 or dim < 1:
        raise ConfigError(
            f"batch_downsample: ratio {downsample_ratio} and dim {dim} must be positive"
        )
    step = max(1, _WORKSPACE_ELEMENTS // (dim * downsample_ratio**2))

    def kernel(
        features: Tensor,
        images_id: Tensor,
        spatial_crop: Tensor,
        cu_seqlen_downsp: Tensor,
        cu_seqlen: Tensor,
        concat: Tensor | None,
        pooled: Tensor | None,
    ) -> None:
        grids = PatchGrids(spatial_crop, cu_seqlen, cu_seqlen_downsp, downsample_ratio)
        for start in range(0, images_id.shape[0], step):
            image = images_id[start : start + step]
            merged = torch.arange(start, start + image.shape[0], device=image.device)
            cells = square_cells(grids, image, merged)
            if do_downsample:
                assert pooled is not None
                pooled[start : start + step] = pool_cells(features, cells)
            else:
                assert concat is not None
                part = concat[start : start + step]
                part.copy_(concatenate_cells(features, cells).view_as(part))

    return kernel
