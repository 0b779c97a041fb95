"""Training of the draft blocks on the network's own greedy continuations."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from tqdm import tqdm

from tools.train_demo.continuations import FEATURES, FILE
from tools.train_demo.data import Prepared
from tools.train_demo.drafts import Anchors, DraftNetwork
from tools.train_demo.functions import CrossEntropy
from tools.train_demo.lanes import Lanes, Memory, Share, collect
from tools.train_demo.network import network_for
from tools.train_demo.optimizer import Optimizer, schedule
from tools.train_demo.recipe import Folder, Recipe
from tools.train_demo.state import Log, State
from tools.train_demo.trainer import MAIN_STATE, balance
from tools.train_demo.weights import RELEASED, Kind, Precision, plan, start, working_copy

DRAFT_STATE = "drafts.pt"
_UNQUANTIZED = Precision(torch.bfloat16, False, True)


def is_draft(name: str) -> bool:
    """Whether a weight belongs to the draft blocks and learns from gradients."""
    return name.startswith("mtp.") and not name.endswith("gate.bias")


@dataclass
class Verdict:
    """What the drafts of blocks are worth; tables have a row per block."""

    loss: Tensor
    guess: Tensor
    """Confidence logits ``[A, n]``."""
    right: Tensor
    """Whether a draft is the token that follows, bool ``[A, n]``."""
    loads: dict[str, Tensor]


@dataclass
class Judge:
    """Drafts behind known tokens, compared with the tokens that follow."""

    recipe: Recipe
    data: Prepared

    def __post_init__(self) -> None:
        network = network_for(self.data.config, self.data.hasher, RELEASED)
        self.drafts = DraftNetwork(network)

    def __call__(
        self, w: dict[str, Tensor], ids: Tensor, anchors: Anchors, features: Tensor
    ) -> Verdict:
        """Judge blocks in sequences ``ids [B, T]`` with features ``[B * T, targets * D]``."""
        count = self.recipe.drafts.block
        main = self.drafts.main_keys(w, features, len(ids))
        window = anchors.position[:, None] + torch.arange(count + 1)
        tokens = ids[anchors.sequence[:, None], window]
        forward = self.drafts(w, tokens[:, 0], anchors, main, count)
        previous, wanted = tokens[:, :-1].flatten(), tokens[:, 1:].flatten()
        embedding = self.drafts.markov(w, previous)
        rows = torch.cat((forward.normed, embedding), 1)
        loss, _, best = CrossEntropy.apply(rows, self.drafts.joint_head(w), wanted)
        guess = self.drafts.confidence(w, forward.hidden, embedding).view(-1, count)
        return Verdict(loss, guess, (best == wanted).view(-1, count), forward.loads)


@dataclass
class DraftWorker:
    """One lane's part of a step."""

    recipe: Recipe
    data: Prepared
    kinds: dict[str, Kind]
    folder: Folder
    memory: Memory

    def __post_init__(self) -> None:
        self.texts: NDArray[np.int32] = np.load(self.folder.path(FILE))
        self.features: NDArray[np.int16] = np.load(self.folder.path(FEATURES), mmap_mode="r")
        self.judge = Judge(self.recipe, self.data)
        masters = {n: m for n, m in self.memory.masters.items() if not n.startswith("mtp.")}
        # The network is finished: its weights are quantized once.
        self.fixed = working_copy(masters, self.kinds, RELEASED, lambda name: False)

    def gradients(self, step: int, seen: int, lane: int, lanes: int) -> Share:
        """Forward and backward over this lane's sequences."""
        numbers = self.recipe.drafts
        size = numbers.sequences // lanes
        ids, features, anchors = self._batch(seen + lane * size, size, step)
        quantized = step >= numbers.quantized_from * numbers.steps
        masters = {n: m for n, m in self.memory.masters.items() if n.startswith("mtp.")}
        precision = RELEASED if quantized else _UNQUANTIZED
        work = self.fixed | working_copy(masters, self.kinds, precision, is_draft)
        losses, loads = self.loss(work, ids, anchors, features)
        (losses["loss"] + numbers.confidence_weight * losses["confidence"]).backward()
        collect(self.memory, lane, work)
        return Share({name: float(x.detach()) for name, x in losses.items()}, loads)

    def _batch(self, first: int, size: int, step: int) -> tuple[Tensor, Tensor, Anchors]:
        """Sequences of an endless shuffled run over the continuations, and anchors in them.

        Returns ids ``[B, T]``, features ``[B * T, targets * D]`` and the anchors.
        """
        numbers, count = self.recipe.drafts, len(self.texts)
        rows = []
        for number in range(first, first + size):
            epoch, place = divmod(number, count)
            order = np.random.default_rng([self.recipe.seed, 5, epoch]).permutation(count)
            rows.append(order[place])
        table = torch.from_numpy(self.texts[rows].astype(np.int64))
        features = torch.from_numpy(self.features[rows]).view(torch.bfloat16).flatten(0, 1)
        generator = np.random.default_rng([self.recipe.seed, 6, step, first])
        last = numbers.context - numbers.block - 1
        places = [
            torch.from_numpy(generator.integers(int(row[0]), last + 1, size=numbers.anchors))
            for row in table
        ]
        sequence = torch.arange(size).repeat_interleave(numbers.anchors)
        anchors = Anchors(sequence, torch.cat(places), numbers.context)
        return table[:, 1:].contiguous(), features, anchors

    def loss(
        self, w: dict[str, Tensor], ids: Tensor, anchors: Anchors, features: Tensor
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Cross-entropy, loss of the confidences and (for the log) accepted drafts per block."""
        verdict = self.judge(w, ids, anchors, features)
        right = verdict.right
        reached = torch.cat((torch.ones(len(right), 1), right[:, :-1].cumprod(1)), 1).bool()
        confidence = torch.nn.functional.binary_cross_entropy_with_logits(
            verdict.guess[reached], right[reached].float()
        )
        accepted = right.float().cumprod(1).sum(1).mean()
        losses = {"loss": verdict.loss, "confidence": confidence, "accepted": accepted}
        return losses, verdict.loads


@dataclass
class DraftTrainer:
    """The draft training of a run."""

    recipe: Recipe
    folder: Folder
    data: Prepared
    quiet: bool = False

    def __post_init__(self) -> None:
        slots, _ = plan(self.data.config)
        self.kinds = {slot.name: slot.kind for slot in slots}
        masters = start(self.data.config, slots, self.recipe.seed)
        saved = torch.load(self.folder.path(MAIN_STATE), weights_only=True)["masters"]
        masters |= {n: m for n, m in saved.items() if not n.startswith("mtp.")}
        optimizer = Optimizer(self.recipe.drafts.rates, self.kinds)
        trained = [name for name in masters if is_draft(name)]
        self.memory = Memory.make(masters, optimizer, trained, self.recipe.lanes)
        self.state = State(masters, optimizer)

    def run(self, stop_at: int | None = None) -> State:
        """Train to the end (or to a step), continuing where the last start got to."""
        numbers, state = self.recipe.drafts, self.state
        path, log = self.folder.path(DRAFT_STATE), Log(self.folder.path("log.jsonl"))
        state.restore(path)
        last = numbers.steps if stop_at is None else min(stop_at, numbers.steps)
        torch.set_num_threads(1)
        maker = partial(DraftWorker, self.recipe, self.data, self.kinds, self.folder)
        lanes = Lanes(self.memory, maker)
        bar = tqdm(total=numbers.steps, initial=state.step, disable=self.quiet, mininterval=5.0)
        while state.step < last:
            factor = schedule(
                state.step, numbers.steps, numbers.warmup, numbers.decay, numbers.floor
            )
            shares, norm = lanes.step(state.step, state.seen.get(0, 0), factor)
            loads = {n: sum(share.loads[n] for share in shares) for n in shares[0].loads}
            balance(state.masters, loads, numbers.bias_rate * factor)
            state.seen[0] = state.seen.get(0, 0) + numbers.sequences
            state.step += 1
            record = {
                key: sum(share.losses[key] for share in shares) / len(shares)
                for key in shares[0].losses
            }
            bar.update(1)
            bar.set_postfix_str(f"accepted {record['accepted']:.2f}", refresh=False)
            log.write("drafts", state.step, record | {"norm": norm})
            if state.step % numbers.checkpoint_every == 0 or state.step == last:
                state.save(path)
        bar.close()
        lanes.close()
        return state
