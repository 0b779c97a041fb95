"""Training of the network itself: resumable, one step after the other."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from statistics import mean

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from tools.train_demo import corpus
from tools.train_demo.data import Prepared
from tools.train_demo.functions import CrossEntropy
from tools.train_demo.lanes import Lanes, Memory, Share, collect
from tools.train_demo.network import Network, Options, network_for
from tools.train_demo.optimizer import Optimizer, schedule
from tools.train_demo.recipe import Folder, Recipe, Stage
from tools.train_demo.state import Log, State
from tools.train_demo.weights import PLAIN, RELEASED, Kind, plan, start, working_copy

MAIN_STATE = "main.pt"


def is_main(name: str) -> bool:
    """Whether a weight belongs to the network and learns from gradients."""
    return not name.startswith("mtp.") and not name.endswith("gate.bias")


@dataclass
class MainWorker:
    """One lane's part of a step."""

    recipe: Recipe
    data: Prepared
    kinds: dict[str, Kind]
    memory: Memory

    def __post_init__(self) -> None:
        self.networks = {
            precision: network_for(self.data.config, self.data.hasher, precision)
            for precision in (PLAIN, RELEASED)
        }

    def gradients(self, step: int, seen: int, lane: int, lanes: int) -> Share:
        """Forward and backward over this lane's sequences."""
        numbers = self.recipe.main
        stage = stage_at(numbers.stages, step)
        size = stage.sequences // lanes
        ids, targets = corpus.batch(
            self.data.tokens, seen + lane * size, size, stage.context, self.recipe.seed
        )
        precision = RELEASED if stage.quantized else PLAIN
        learns = step % numbers.index_every == 0
        options = Options(stage.sparse, numbers.index_rows if learns else 0)
        work = working_copy(self.memory.masters, self.kinds, precision, is_main)
        forward = self.networks[precision](work, ids, options)
        loss, _, _ = CrossEntropy.apply(forward.hidden, work["head.weight"], targets.flatten())
        (loss + numbers.index_weight * forward.index_loss).backward()
        collect(self.memory, lane, work)
        losses = {"loss": float(loss.detach()), "index": float(forward.index_loss.detach())}
        return Share(losses, forward.loads)


def stage_at(stages: Sequence[Stage], step: int) -> Stage:
    """The stage of a step."""
    for stage in stages:
        if step < stage.steps:
            return stage
        step -= stage.steps
    return stages[-1]


@dataclass
class Trainer:
    """One training run in a folder."""

    recipe: Recipe
    folder: Folder
    data: Prepared
    quiet: bool = False

    def __post_init__(self) -> None:
        slots, _ = plan(self.data.config)
        self.kinds: dict[str, Kind] = {slot.name: slot.kind for slot in slots}
        optimizer = Optimizer(self.recipe.main.rates, self.kinds)
        masters = start(self.data.config, slots, self.recipe.seed)
        trained = [name for name in masters if is_main(name)]
        self.memory = Memory.make(masters, optimizer, trained, self.recipe.lanes)
        self.state = State(masters, optimizer)

    def run(self, stop_at: int | None = None) -> State:
        """Train to the end (or to a step), continuing where the last start got to."""
        numbers, state = self.recipe.main, self.state
        path, log = self.folder.path(MAIN_STATE), Log(self.folder.path("log.jsonl"))
        state.restore(path)
        last = numbers.steps if stop_at is None else min(stop_at, numbers.steps)
        torch.set_num_threads(1)
        lanes = Lanes(self.memory, partial(MainWorker, self.recipe, self.data, self.kinds))
        bar = tqdm(total=numbers.steps, initial=state.step, disable=self.quiet, mininterval=5.0)
        while state.step < last:
            record = self.step(lanes)
            bar.update(1)
            bar.set_postfix_str(f"loss {record['loss']:.3f}", refresh=False)
            log.write("main", state.step, record)
            if state.step % numbers.checkpoint_every == 0 or state.step == last:
                state.save(path)
        bar.close()
        lanes.close()
        return state

    def step(self, lanes: Lanes) -> dict[str, float]:
        """One update; returns what the log keeps of it."""
        numbers, state = self.recipe.main, self.state
        began = time.perf_counter()
        stage = stage_at(numbers.stages, state.step)
        factor = schedule(state.step, numbers.steps, numbers.warmup, numbers.decay, numbers.floor)
        shares, norm = lanes.step(state.step, state.seen.get(stage.context, 0), factor)
        loads = {n: sum(share.loads[n] for share in shares) for n in shares[0].loads}
        balance(state.masters, loads, numbers.bias_rate * factor)
        state.seen[stage.context] = state.seen.get(stage.context, 0) + stage.sequences
        state.step += 1
        seconds = time.perf_counter() - began
        state.seconds += seconds
        record = {key: mean([share.losses[key] for share in shares]) for key in shares[0].losses}
        spread = max(float(load.max() / load.float().mean()) for load in loads.values())
        speed = stage.sequences * stage.context / seconds
        return record | {"norm": norm, "busiest": spread, "tokens_per_second": speed}


@torch.no_grad()
def balance(masters: dict[str, Tensor], loads: dict[str, Tensor], rate: float) -> None:
    """Move the selection biases of experts towards equal loads."""
    for name, load in loads.items():
        wanted = load.float().mean()
        masters[name] += rate * torch.sign(wanted - load.float())


@torch.no_grad()
def held_out_loss(
    network: Network, work: dict[str, Tensor], documents: list[list[int]], context: int
) -> tuple[float, int]:
    """Summed cross-entropy in nats and number of tokens over documents.

    Documents are cut into pieces of ``context`` tokens, each behind a sentence start; what is left
    over at the end is padded. ``context`` is a multiple of the window.
    """
    pieces = []
    for ids in documents:
        for at in range(0, len(ids), context):
            piece = np.full(context, -1, dtype=np.int64)
            part = ids[at : at + context]
            piece[: len(part)] = part
            pieces.append(piece)
    total, count = 0.0, 0
    for at in range(0, len(pieces), 16):
        targets = torch.from_numpy(np.stack(pieces[at : at + 16]))
        ids = torch.cat((torch.zeros(len(targets), 1, dtype=torch.int64), targets[:, :-1]), 1)
        hidden = network(work, ids.clamp(min=0), Options(sparse=True)).hidden
        _, losses, _ = CrossEntropy.apply(hidden, work["head.weight"], targets.flatten())
        total += float(losses.double().sum())
        count += int((targets >= 0).sum())
    return total, count
