"""Steps on a device: passes of static shape, one upload and one download each."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer_neuron.cache.pools import BLOCK_TOKENS
from deepinfer_neuron.model.shapes import PassShape
from deepinfer_neuron.runner.executor import DeviceWork, Executor, Member, PhaseSeconds
from deepinfer_neuron.runner.pack import ChunkPlan
from deepinfer_neuron.runner.pack_static import StaticPlan
from deepinfer_neuron.runner.plan import StepPlan
from deepinfer_neuron.runner.static_worker import PassOutcome, QueuedPass, StaticWorker
from deepinfer_neuron.sampling.drafts import Draft
from deepinfer_neuron.sampling.sampler import Sampler


@dataclass(frozen=True)
class _Pass:
    """Members that run side by side."""

    members: list[Member]
    chunks: list[ChunkPlan]
    shape: PassShape


class StaticExecutor(Executor):
    """Runs steps as passes out of a bucket ladder.

    Sequences with few rows share one pass; every longer piece of a prompt is a pass of its own.
    Where all sequences of a pass take the most probable token and report nothing, tokens are
    chosen, drafts verified and the next ones proposed on the device; otherwise the logits of the
    pass come to the host, and its choice goes back.

    Args:
        worker: network and caches.
        sampler: chooses tokens on the host.
        num_slots: slots, the dummy slot 0 included.
    """

    def __init__(self, worker: StaticWorker, sampler: Sampler, num_slots: int) -> None:
        super().__init__(worker, sampler, num_slots)
        self._static, self._ladder = worker, worker.ladder

    def device_work(self) -> DeviceWork:
        """Counts since the worker was made."""
        worker = self._static
        return DeviceWork(
            len(worker.regions.records),
            worker.regions.compiled_late,
            worker.regions.calls,
            worker.passes,
            worker.uploads,
            worker.downloads,
        )

    def _advance(self, plan: StepPlan, members: list[Member]) -> PhaseSeconds:
        """Run every pass to its end, one after the other."""
        started = time.monotonic()
        passes = self._passes(members, self._chunks(plan, members))
        spent = [self._run(item) for item in passes]
        queued = sum(seconds for seconds, _ in spent)
        drafted = sum(seconds for _, seconds in spent)
        return PhaseSeconds(time.monotonic() - started - queued - drafted, drafted)

    def _passes(self, members: Sequence[Member], chunks: Sequence[ChunkPlan]) -> list[_Pass]:
        ladder, pairs = self._ladder, list(zip(members, chunks, strict=True))
        short = [pair for pair in pairs if self._is_short(pair[0])]
        passes = []
        most = ladder.sequences[-1]
        for start in range(0, len(short), most):
            part = short[start : start + most]
            drafts = max(len(member.drafts) for member, _ in part)
            blocks = max(_blocks(member) for member, _ in part)
            rows = max(member.end - member.begin for member, _ in part)
            shape = ladder.decode_shape(len(part), max(drafts, rows - 1), blocks)
            passes.append(_Pass([m for m, _ in part], [c for _, c in part], shape))
        for member, chunk in pairs:
            if not self._is_short(member):
                shape = ladder.prefill_shape(member.end - member.begin, _blocks(member))
                passes.append(_Pass([member], [chunk], shape))
        return passes

    def _is_short(self, member: Member) -> bool:
        """Whether a member's rows fit into a decode pass."""
        return member.end - member.begin <= 1 + self._ladder.nextn

    def _run(self, item: _Pass) -> tuple[float, float]:
        """Run a pass; returns the seconds until it was queued, and those spent on drafts."""
        started = time.monotonic()
        plans = [
            StaticPlan(chunk, len(member.drafts))
            for member, chunk in zip(item.members, item.chunks, strict=True)
        ]
        platform, label = self._static.platform, pass_label(item.shape)
        sampling = [member for member in item.members if member.samples]
        plain = all(self.sampler.is_plain(member.data.state) for member in sampling)
        scored = any(member.data.scores_prompt for member in item.members)
        with platform.step(label):
            queued = self._static.queue(plans, item.shape)
            seconds = time.monotonic() - started
            if sampling and plain and not scored:
                self._finish_plain(item, queued)
                return seconds, 0.0
        for place, member in enumerate(item.members):
            self._score_prompt(queued, item.shape, place, member)
        if not sampling:
            return seconds, 0.0
        with platform.step(f"{label} {'verify' if plain else 'logits'}"):
            if plain:
                self._finish_plain(item, queued)
                return seconds, 0.0
            logits = self._static.logits(queued)
        self._choose_on_host(item, logits)
        drafting = time.monotonic()
        if self._ladder.nextn and any(_goes_on(member) for member in sampling):
            tokens, accepted = _chosen(item.members, item.shape.outputs)
            with platform.step(f"{label} drafts"):
                outcome = self._static.propose(queued, tokens, accepted)
            self._draft(item.members, outcome)
        return seconds, time.monotonic() - drafting

    def _finish_plain(self, item: _Pass, queued: QueuedPass) -> None:
        """Let the device choose, verify and propose."""
        outcome = self._static.verify(queued, len(item.members))
        self._take(item.members, outcome)
        self._draft(item.members, outcome)

    def _take(self, members: Sequence[Member], outcome: PassOutcome) -> None:
        """Give plain sequences the tokens that the device chose, up to the one they end with."""
        rows = zip(members, outcome.tokens.tolist(), outcome.accepted.tolist(), strict=True)
        for member, tokens, accepted in rows:
            if not member.samples:
                continue
            for token in tokens[: accepted + 1]:
                result = self.sampler.take(member.data.state, token)
                code = int(self.worker.compress([result.token_id])[0])
                member.data.append(result.token_id, code)
                member.tokens.append(result)
                if result.failed is not None or member.data.state.ends_with(result.token_id):
                    break

    def _choose_on_host(self, item: _Pass, logits: Tensor) -> None:
        outputs = item.shape.outputs
        sampling = [(p, m) for p, m in enumerate(item.members) if m.samples]
        self._choose([m for _, m in sampling], logits, [place * outputs for place, _ in sampling])

    def _draft(self, members: Sequence[Member], outcome: PassOutcome) -> None:
        """Keep the drafts of the members that go on."""
        wanting = {id(member) for member in self._wanting(members)}
        trust = outcome.confidences.nan_to_num(nan=0.0).tolist()
        for member, tokens, chances in zip(members, outcome.drafts.tolist(), trust, strict=True):
            if id(member) in wanting and tokens:
                pairs = zip(tokens, chances, strict=True)
                self._give(member.data, [Draft(token, chance) for token, chance in pairs])

    def _score_prompt(
        self, queued: QueuedPass, shape: PassShape, place: int, member: Member
    ) -> None:
        """Scores of prompt tokens; the rows' logits come in pieces of the pass's output rows."""
        width = shape.sequences * shape.outputs

        def logits(start: int, stop: int) -> Tensor:
            rows = torch.arange(start, stop, dtype=torch.int32) + place * shape.rows
            parts = []
            for part in rows.split(width):
                padded = torch.zeros(width, dtype=torch.int32)
                padded[: len(part)] = part
                with self._static.platform.step(f"{pass_label(shape)} prompt scores"):
                    parts.append(self._static.logits(queued, padded)[: len(part)])
            return torch.cat(parts)

        self._score_rows(member.data, member.begin, member.end, logits)


def pass_label(shape: PassShape) -> str:
    """Name of the steps that run a pass of this shape."""
    return f"{shape.sequences} x {shape.rows} rows, {shape.blocks} blocks"


def _goes_on(member: Member) -> bool:
    """Whether a member that sampled has not ended."""
    last = member.tokens[-1]
    return last.failed is None and not member.data.state.ends_with(last.token_id)


def _blocks(member: Member) -> int:
    return -(-member.end // BLOCK_TOKENS)


def _chosen(members: Sequence[Member], outputs: int) -> tuple[Tensor, Tensor]:
    """New tokens int32 ``[members, O]``, and the place of each member's last one ``[members]``."""
    tokens = torch.zeros(len(members), outputs, dtype=torch.int32)
    place = torch.zeros(len(members), dtype=torch.int32)
    for index, member in enumerate(members):
        ids = [result.token_id for result in member.tokens]
        if ids:
            tokens[index, : len(ids)] = torch.tensor(ids, dtype=torch.int32)
            place[index] = len(ids) - 1
    return tokens, place
