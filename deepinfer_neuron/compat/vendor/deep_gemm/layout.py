"""Scale layouts and the alignment of grouped rows."""

from __future__ import annotations

from torch import Tensor

from deepinfer_neuron.compat.vendor.knobs import ALIGNMENT, KNOBS, checked_alignment
from deepinfer_neuron.compat.vendor.operands import require, shape
from deepinfer_neuron.ops.scale_layout import aligned_length, required_layout


def get_tma_aligned_size(mn: int, itemsize: int) -> int:
    """``mn`` rounded up to a multiple of 16 bytes, in elements of ``itemsize`` bytes."""
    return aligned_length(mn, itemsize)


def transform_sf_into_required_layout(
    sf: Tensor,
    mn: int,
    k: int,
    recipe: tuple[int, ...],
    num_groups: int | None = None,
    is_sfa: bool | None = None,
    disable_ue8m0_cast: bool = False,
) -> Tensor:
    """Packed column-major scales, one row per matrix row.

    Args:
        sf: fp32 powers of two ``[(G,) ceil(mn/gran_mn), ceil(k/gran_k)]``; packed scales are
            checked and returned.
        mn: rows of the matrix.
        k: columns of the matrix.
        recipe: ``(gran_mn, gran_k)``, or ``(gran_m, gran_n, gran_k)`` of which ``is_sfa`` picks
            the first or the second.
        num_groups: ``G``, if there is that axis.
        is_sfa: whether these are the scales of the left operand.
        disable_ue8m0_cast: only ``False`` is supported.

    Returns:
        ``[(G,) mn, words]`` with strides ``(..., 1, L)``, ``L`` being ``mn`` rounded up to 16
        bytes.

    Raises:
        ConfigError: a shape, type or recipe that is not one of these.
    """
    require(not disable_ue8m0_cast, "disable_ue8m0_cast=True is not supported; leave it out.")
    require(
        len(recipe) == 2 or (len(recipe) == 3 and is_sfa is not None),
        f"recipe is {recipe} with is_sfa={is_sfa}; give (gran_mn, gran_k), or three numbers and "
        "is_sfa.",
    )
    gran_mn = recipe[0] if len(recipe) == 2 or is_sfa else recipe[1]
    groups = () if num_groups is None else (num_groups,)
    require(
        tuple(sf.shape[:-2]) == groups and sf.dim() >= 2,
        f"scales are {shape(sf)} for num_groups={num_groups}; give [G, rows, columns] with "
        "num_groups=G, or a matrix without it.",
    )
    return required_layout(sf, mn, k, (gran_mn, recipe[-1]), KNOBS.scale_word)


def get_theoretical_mk_alignment_for_contiguous_layout(expected_m: int | None = None) -> int:
    """The alignment that suits this implementation, whatever the number of rows."""
    return ALIGNMENT


def set_mk_alignment_for_contiguous_layout(alignment: int) -> None:
    """Align the first row of every expert to ``alignment`` in grouped products."""
    KNOBS.row_alignment = checked_alignment(alignment)


def get_mk_alignment_for_contiguous_layout() -> int:
    """The alignment in force."""
    return KNOBS.row_alignment
