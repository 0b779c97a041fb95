"""First regions of a pass: metadata taken apart, tokens embedded."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from deepinfer_neuron.model.shapes import PassShape
from deepinfer_neuron.model.static.metadata import MetadataLayout
from deepinfer_neuron.model.static.step import OutputRows, RatioRows, StaticStep, WindowRows
from deepinfer_neuron.ops.arithmetic import Arithmetic
from deepinfer_neuron.ops.gather import gather_rows
from deepinfer_neuron.platform.regions import RegionModule, Regions, region


class Preparation(RegionModule):
    """Turns the uploaded block into the tensors that the other regions take.

    Args:
        layout: fields of the block.
        base_table: fp32 ``[positions, R]``, rotary table of the window-only layers.
        compressed_table: the same of the compressed layers.
        regions: where regions run.
    """

    def __init__(
        self, layout: MetadataLayout, base_table: Tensor, compressed_table: Tensor, regions: Regions
    ) -> None:
        super().__init__(regions)
        self.layout = layout
        self.base_table = nn.Buffer(base_table, persistent=False)
        self.compressed_table = nn.Buffer(compressed_table, persistent=False)

    @region
    def prepare(self, block: Tensor, shape: PassShape) -> StaticStep:
        """Take the int32 ``[size]`` block of a pass apart."""
        layout = self.layout
        field = layout.split(block, shape)
        keys = window_keys(
            field["positions"], field["valid"], field["begin"], shape, layout.window
        )  # fmt: skip
        shared = (keys, field["history"], field["window_places"], field["page_places"])
        ratios = {
            ratio: RatioRows(
                field["tables"],
                field[f"visible_{ratio}"],
                field[f"slots_{ratio}"],
                table_rows(self.compressed_table, field[f"turns_{ratio}"]),
                *(field[name] if ratio == 2 else None for name in _PAIR_FIELDS),
            )
            for ratio in layout.ratios
        }
        return StaticStep(
            token_ids=field["token_ids"],
            plain=WindowRows(table_rows(self.base_table, field["positions"]), *shared),
            compressed=WindowRows(table_rows(self.compressed_table, field["positions"]), *shared),
            ratio_1=ratios.get(1),
            ratio_2=ratios.get(2),
            outputs=OutputRows(
                field["output_rows"], field["proposals"], field["next"], field.get("proposed")
            ),
            engram=tuple(rows.clone() for rows in field["engram"]) if "engram" in field else (),
            draft_history=field.get("draft_history"),
        )


_PAIR_FIELDS = ("rows_2", "first_2", "pair_read", "pair_places")


def window_keys(
    positions: Tensor, valid: Tensor, begin: Tensor, shape: PassShape, window: int
) -> Tensor:
    """Keys that every row sees in ``[history of S sequences | n rows]``.

    Args:
        positions: int32 ``[n]``.
        valid: int32 ``[n]``, 0 for padding.
        begin: int32 ``[S]``, position of each sequence's first row.
        shape: of the pass.
        window: tokens of the window.

    Returns:
        int32 ``[n, W]``, ascending positions, -1 behind.
    """
    sequences, rows, kept = shape.sequences, shape.rows, window - 1
    position = positions.view(sequences, rows, 1)
    start = begin.view(sequences, 1, 1)
    sequence = torch.arange(sequences, dtype=torch.int32, device=positions.device).view(-1, 1, 1)
    column = torch.arange(window, dtype=torch.int32, device=positions.device)
    key = (position - kept).clamp(min=0) + column
    before = sequence * kept + (key - start + kept)
    within = sequences * kept + sequence * rows + (key - start)
    index = torch.where(key < start, before, within)
    seen = (key <= position) & (valid.view(sequences, rows, 1) > 0)
    return torch.where(seen, index, -1).view(sequences * rows, window)


def table_rows(table: Tensor, positions: Tensor) -> Tensor:
    """Rows of a rotary table at int32 positions of any shape."""
    return torch.nn.functional.embedding(positions, table)


class Embedding(RegionModule):
    """Token embedding and the first residual streams.

    Args:
        table: bf16 ``[V, D]``; ``None`` if rows are looked up on the host.
        streams: residual streams.
        arithmetic: activation dtype.
        regions: where regions run.
    """

    table: Tensor | None

    def __init__(
        self, table: Tensor | None, streams: int, arithmetic: Arithmetic, regions: Regions
    ) -> None:
        super().__init__(regions)
        self.streams, self.arithmetic = streams, arithmetic
        self.register_buffer("table", table, persistent=False)

    @region
    def start(self, token_ids: Tensor) -> tuple[Tensor, Tensor]:
        """int32 ``[n]`` to the trunk ``[n, M, D]`` and the first mix fp32 ``[n, M]``.

        Ids outside the vocabulary give zeros.
        """
        assert self.table is not None
        return self._streams(gather_rows(self.table, token_ids))

    @region
    def start_from(self, embedded: Tensor) -> tuple[Tensor, Tensor]:
        """The same for rows ``[n, D]`` that were looked up on the host."""
        return self._streams(embedded)

    def _streams(self, embedded: Tensor) -> tuple[Tensor, Tensor]:
        """All streams start as the embedding; the first mix takes stream 0 alone."""
        trunk = embedded.to(self.arithmetic.dtype)[:, None, :].repeat(1, self.streams, 1)
        stream = torch.arange(self.streams, dtype=torch.int32, device=embedded.device)
        pre = (stream == 0).to(torch.float32).expand(embedded.shape[0], -1)
        return trunk, pre.contiguous()
