"""The one upload of a pass: every number the device must be told, as one int32 block.

The host writes the fields side by side (:mod:`deepinfer_neuron.runner.pack_static`), a region
takes them apart again. Offsets depend on the shape of the pass alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from deepinfer_neuron.checkpoint.config import ModelConfig
from deepinfer_neuron.model.shapes import PassShape


@dataclass(frozen=True)
class MetadataLayout:
    """Fields of the block, in order, with the model's sizes.

    Attributes:
        window: tokens of the sliding window.
        ratios: compression ratios in use, of 1 and 2.
        engram_layers: layers with an n-gram table.
        engram_columns: table rows that a token reads.
        nextn: drafts per sequence, 0 for none.
    """

    window: int
    ratios: tuple[int, ...]
    engram_layers: int
    engram_columns: int
    nextn: int

    @classmethod
    def of(cls, config: ModelConfig, nextn: int) -> MetadataLayout:
        """Layout for a model."""
        engram = config.engram
        return cls(
            config.sliding_window,
            tuple(sorted({spec.ratio for spec in config.layers if spec.owns_kv})),
            len(engram.layer_ids) if engram is not None else 0,
            engram.num_columns if engram is not None else 0,
            nextn,
        )

    def entries(self, ratio: int, shape: PassShape) -> int:
        """Compressed entries that a pass can complete."""
        return shape.sequences * max(1, shape.rows // ratio)

    def fields(self, shape: PassShape) -> dict[str, tuple[int, ...]]:
        """Shape of every field; ``n`` rows are sequence after sequence.

        * ``token_ids``, ``positions``, ``valid`` ``[n]``;
        * ``begin`` ``[S]``: position of each sequence's first row;
        * ``history`` ``[S * (W - 1)]``: ring places of the positions before it, oldest first;
        * ``window_places``, ``page_places`` ``[n]``: where window keys go;
        * ``tables`` ``[S, B]``;
        * ``output_rows`` ``[S * O]`` rows that want logits, ``proposed`` ``[S, O - 1]`` the drafts
          on them, ``proposals`` ``[S]`` how many there are, ``next`` ``[S]`` position behind the
          first output row;
        * per ratio ``visible`` ``[n]`` entries that a row may see, ``slots`` and ``turns`` ``[e]``
          slot and position of the entries completed;
        * for ratio 2 also ``rows`` and ``first`` ``[e]``, last and first token of each entry in
          ``[S rows read from the ring | n rows]``, ``pair_read`` ``[S]`` and ``pair_places``
          ``[n]``;
        * ``engram`` ``[L, n, columns]``, -1 reads nothing;
        * with drafts, ``draft_history`` ``[S, W + K]``: ring places of the ``W`` positions before
          ``next`` and the ``K`` from there on.
        """
        sequences, rows = shape.sequences, shape.total_rows
        fields: dict[str, tuple[int, ...]] = {
            "token_ids": (rows,),
            "positions": (rows,),
            "valid": (rows,),
            "begin": (sequences,),
            "history": (sequences * (self.window - 1),),
            "window_places": (rows,),
            "page_places": (rows,),
            "tables": (sequences, shape.blocks),
            "output_rows": (sequences * shape.outputs,),
            "proposals": (sequences,),
            "next": (sequences,),
        }
        if shape.outputs > 1:
            fields["proposed"] = (sequences, shape.outputs - 1)
        for ratio in self.ratios:
            entries = self.entries(ratio, shape)
            fields[f"visible_{ratio}"] = (rows,)
            fields[f"slots_{ratio}"] = (entries,)
            fields[f"turns_{ratio}"] = (entries,)
        if 2 in self.ratios:
            entries = self.entries(2, shape)
            fields |= {
                "rows_2": (entries,),
                "first_2": (entries,),
                "pair_read": (sequences,),
                "pair_places": (rows,),
            }
        if self.engram_layers:
            fields["engram"] = (self.engram_layers, rows, self.engram_columns)
        if self.nextn:
            fields["draft_history"] = (sequences, self.window + self.nextn)
        return fields

    def size(self, shape: PassShape) -> int:
        """Words of the block."""
        return sum(math.prod(field) for field in self.fields(shape).values())

    def split(self, block: Tensor, shape: PassShape) -> dict[str, Tensor]:
        """The fields of an int32 block ``[size]``, each a tensor of its own."""
        parts, start = {}, 0
        for name, size in self.fields(shape).items():
            stop = start + math.prod(size)
            parts[name] = block[start:stop].clone().view(size)
            start = stop
        return parts
