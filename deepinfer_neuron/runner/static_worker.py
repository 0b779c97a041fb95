"""The static network with its weights and caches on a device: takes plans, queues passes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer_neuron.cache.pools import CacheShape
from deepinfer_neuron.checkpoint.reader import Checkpoint
from deepinfer_neuron.model.matrix import WeightSource
from deepinfer_neuron.model.shapes import PassShape
from deepinfer_neuron.model.static.heads import INVALID
from deepinfer_neuron.model.static.network import StaticCaches, StaticNetwork, Trunk
from deepinfer_neuron.model.static.step import StaticStep
from deepinfer_neuron.ops.arithmetic import Arithmetic
from deepinfer_neuron.ops.gather import gather_rows
from deepinfer_neuron.platform.base import Platform
from deepinfer_neuron.platform.regions import Regions
from deepinfer_neuron.runner.buckets import Ladder
from deepinfer_neuron.runner.hashes import TokenHashes
from deepinfer_neuron.runner.pack import ChunkPlan, window_copy
from deepinfer_neuron.runner.pack_static import StaticPlan, pack_static
from deepinfer_neuron.runner.worker import step_geometry

__all__ = ["INVALID", "PassOutcome", "QueuedPass", "StaticWorker"]


@dataclass(frozen=True)
class QueuedPass:
    """A pass whose backbone is queued on the device."""

    trunk: Trunk
    step: StaticStep


@dataclass(frozen=True)
class PassOutcome:
    """What one download tells of a pass; rows are its plans."""

    tokens: Tensor
    """int32 ``[plans, O]`` most probable tokens, :data:`INVALID` where logits were not finite."""
    accepted: Tensor
    """int32 ``[plans]`` drafts that the tokens confirm."""
    drafts: Tensor
    """int32 ``[plans, K]`` for the next step; ``K`` may be 0."""
    confidences: Tensor
    """fp32 ``[plans, K]``."""


def _placed(network: StaticNetwork, platform: Platform) -> StaticNetwork:
    """The network with every buffer on the device, one copy each."""
    for module in network.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, platform.to_device(buffer))
    return network


class StaticWorker(TokenHashes):
    """Owns the network and its caches on one device.

    Args:
        checkpoint: opened files; must stay open.
        arithmetic: order and form of the operators.
        platform: the device.
        regions: where regions run.
        expanded: decode quantized weights once, or in every region that uses them; a set of names
            decodes just those matrices once.
        max_length: exclusive upper bound of every position of a sequence.
        nextn: drafts per sequence; 0 leaves the draft blocks unloaded.
        backtracking: tokens that the rings let a sequence undo, at least ``nextn + 1``.
        temperatures: ``nextn`` divisors of the confidence logits.
        host_embed: leave the token embedding in host memory.
        ladder: shapes of the passes.
        progress: show a bar while loading.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        arithmetic: Arithmetic,
        platform: Platform,
        regions: Regions,
        ladder: Ladder,
        *,
        expanded: bool | frozenset[str],
        max_length: int,
        nextn: int = 0,
        backtracking: int = 0,
        temperatures: tuple[float, ...] = (),
        host_embed: bool = False,
        progress: bool = False,
    ) -> None:
        super().__init__(checkpoint)
        self.config, self.nextn = checkpoint.config, nextn
        self.platform, self.regions, self.ladder = platform, regions, ladder
        source = WeightSource(checkpoint, expanded, arithmetic)
        network = StaticNetwork(
            self.config, source, max_length, regions, nextn=nextn, host_embed=host_embed,
            temperatures=temperatures, progress=progress,
        )  # fmt: skip
        self.network = _placed(network, platform)
        self._buffers: dict[tuple[object, ...], Tensor] = {}
        self.layout = network.layout
        self.geometry = step_geometry(self.config, max(backtracking, nextn + 1))
        self._caches: StaticCaches | None = None
        self._table = source.plain("embed.weight") if host_embed else None
        self.passes = 0
        """Passes queued so far."""
        self.uploads = 0
        self.downloads = 0

    def allocate(self, num_blocks: int, num_sequences: int, num_pages: int = 0) -> None:
        """Fresh caches for so many usable blocks, sequences and window pages.

        The dummy block, slot and page 0 are added. Old caches are dropped first.
        """
        self._caches = None
        geometry = self.geometry
        shape = CacheShape(
            num_blocks + 1, num_sequences + 1, geometry.window_ring, geometry.pair_ring,
            num_pages + 1, geometry.page_tail,
        )  # fmt: skip
        self._caches = self.network.allocate(shape, self.platform.device)

    @property
    def caches(self) -> StaticCaches:
        """Of every layer."""
        if self._caches is None:
            raise RuntimeError("the caches are not allocated")
        return self._caches

    @torch.inference_mode()
    def queue(self, plans: Sequence[StaticPlan], shape: PassShape) -> QueuedPass:
        """Queue the backbone of a pass behind one upload."""
        self.passes += 1
        packed = pack_static(plans, shape, self.layout, self.geometry)
        # The token ids come first in the block.
        embedded = self._embedded(packed[: shape.total_rows])
        block = self._upload(packed)
        return QueuedPass(*self.network.run(block, shape, self.caches, embedded))

    @torch.inference_mode()
    def verify(self, queued: QueuedPass, count: int) -> PassOutcome:
        """Most probable tokens, accepted drafts and next drafts, behind one download.

        Args:
            queued: a pass.
            count: its plans.
        """
        tokens, accepted = self.network.head.verify(
            queued.trunk.streams, queued.trunk.mix, queued.step.outputs
        )
        if not self.nextn:
            joined = self.network.head.joined(tokens, accepted)
            return self._outcome(joined, tokens.shape[1], count)
        known = None
        if self._table is not None:
            known = self._download(self.network.head.joined(tokens, accepted))
        return self._propose(queued, tokens, accepted, known, count)

    @torch.inference_mode()
    def logits(self, queued: QueuedPass, rows: Tensor | None = None) -> Tensor:
        """fp32 logits on the host.

        Args:
            queued: a pass.
            rows: int32 ``[o]`` rows of the pass; by default those that its plans want.

        Returns:
            ``[o, V]``, by default ``[S * O, V]``.
        """
        wanted = queued.step.outputs.rows if rows is None else self._upload(rows)
        trunk = queued.trunk
        return self._download(self.network.head.logits(trunk.streams, trunk.mix, wanted))

    @torch.inference_mode()
    def propose(self, queued: QueuedPass, tokens: Tensor, accepted: Tensor) -> PassOutcome:
        """Drafts behind tokens that the host has chosen.

        Args:
            queued: a pass.
            tokens: int32 ``[plans, O]``.
            accepted: int32 ``[plans]``: the newest token of a plan is ``tokens[s, accepted[s]]``.
        """
        count, shape = len(tokens), queued.step.outputs.proposals.shape[0]
        padded = torch.zeros(shape, tokens.shape[1] + 1, dtype=torch.int32)
        padded[:count, :-1], padded[:count, -1] = tokens, accepted
        chosen, place = self.network.head.chosen(self._upload(padded))
        return self._propose(queued, chosen, place, padded, count)

    def hidden(self, plans: Sequence[ChunkPlan]) -> None:
        """Run the backbone over a decode pass and wait for it, to see how long that takes."""
        blocks = max(len(plan.block_table) for plan in plans)
        shape = self.ladder.decode_shape(len(plans), self.nextn, blocks)
        self.queue([StaticPlan(plan) for plan in plans], shape)
        self.platform.synchronize()

    @torch.inference_mode()
    def restore_window(self, slot: int, length: int, pages: Sequence[int]) -> None:
        """Fill a sequence's window rings from the pages of the blocks before ``length``.

        Args:
            slot: the sequence's slot.
            length: tokens it continues from, a multiple of the block size.
            pages: window page of each of its blocks.
        """
        places, sources = window_copy(slot, length, pages, self.geometry)
        width = max(1, self.geometry.window - 1)
        both = torch.zeros(2, width, dtype=torch.int32)
        both[0, : len(places)], both[1, : len(sources)] = places, sources
        with self.platform.step("restore a window"):
            self.network.restore(self._upload(both), self.caches)

    def _propose(
        self, queued: QueuedPass, tokens: Tensor, accepted: Tensor, known: Tensor | None, count: int
    ) -> PassOutcome:
        """Run the draft blocks; ``known`` holds the same tokens and places on the host, where the
        embedding is in its memory."""
        embedded = None
        drafts = self.network.drafts
        if self._table is not None and known is not None and drafts is not None:
            ids = torch.full((len(known), drafts.rows), drafts.noise, dtype=torch.int32)
            newest = known[:, :-1].gather(1, known[:, -1:].to(torch.int64))
            ids[:, :1] = newest.clamp(min=0)
            embedded = self._embedded(ids.flatten())
        proposed = self.network.propose(tokens, accepted, queued.step, self.caches, embedded)
        return self._outcome(proposed, tokens.shape[1], count)

    def _embedded(self, token_ids: Tensor) -> Tensor | None:
        """Rows of the embedding on the device, if it is in host memory."""
        if self._table is None:
            return None
        return self._upload(gather_rows(self._table, token_ids.to(torch.int64)))

    def _upload(self, host: Tensor) -> Tensor:
        """A tensor on the device, in the one buffer of its shape and dtype."""
        kind = (*host.shape, host.dtype)
        if kind not in self._buffers:
            device = self.platform.device
            self._buffers[kind] = torch.zeros(host.shape, dtype=host.dtype, device=device)
        self.uploads += 1
        self.platform.upload(host, self._buffers[kind])
        return self._buffers[kind]

    def _download(self, tensor: Tensor) -> Tensor:
        self.downloads += 1
        return self.platform.download(tensor)

    def _outcome(self, joined: Tensor, outputs: int, count: int) -> PassOutcome:
        host = self._download(joined)[:count]
        drafts = host[:, outputs + 1 :]
        nextn = drafts.shape[1] // 2
        return PassOutcome(
            host[:, :outputs],
            host[:, outputs],
            drafts[:, :nextn],
            drafts[:, nextn:].contiguous().view(torch.float32),
        )
