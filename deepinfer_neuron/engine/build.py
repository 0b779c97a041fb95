"""Puts an engine together from an opened checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from deepinfer_neuron.cache.blocks import BlockManager
from deepinfer_neuron.cache.pools import BLOCK_TOKENS
from deepinfer_neuron.checkpoint.reader import Checkpoint
from deepinfer_neuron.engine.budget import DraftBudget
from deepinfer_neuron.engine.config import EngineConfig, blocks_per_window, check_integer
from deepinfer_neuron.engine.core import EngineCore
from deepinfer_neuron.engine.scheduler import Scheduler, SchedulerConfig
from deepinfer_neuron.engine.step_times import CurveFiles, curve_key, measure_curve, row_counts
from deepinfer_neuron.errors import ConfigError
from deepinfer_neuron.ops.arithmetic import Arithmetic
from deepinfer_neuron.runner.drafter import Drafter
from deepinfer_neuron.runner.executor import Executor
from deepinfer_neuron.runner.worker import Worker
from deepinfer_neuron.sampling.grammar import GrammarCompiler
from deepinfer_neuron.sampling.sampler import Sampler
from deepinfer_neuron.settings import Settings
from deepinfer_neuron.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Parts:
    """The parts an engine shares with its caller."""

    checkpoint: Checkpoint
    tokenizer: Tokenizer
    settings: Settings
    arithmetic: Arithmetic
    expanded: bool
    """Whether quantized weights are decoded once."""
    progress: bool
    """Show a bar while loading."""


def build_engine(parts: Parts, config: EngineConfig) -> EngineCore:
    """Load the network, allocate its caches, and wire scheduler, executor and sampler."""
    model = parts.checkpoint.config
    worker = Worker(
        parts.checkpoint,
        parts.arithmetic,
        expanded=parts.expanded,
        max_length=config.max_model_len,
        progress=parts.progress,
        nextn=config.nextn,
        backtracking=check_integer(
            "DEEPINFER_MAX_BACKTRACKING_TOKENS", parts.settings.backtracking_tokens, 0, 65536
        ),
    )
    slots = config.max_num_seqs + 1
    worker.allocate(config.num_blocks - 1, config.max_num_seqs, config.num_pages - 1)
    sampler = Sampler(
        model.vocab_size,
        parts.arithmetic,
        blacklist=parts.settings.blacklisted_tokens(model.vocab_size),
        sum_smaller_probs=parts.settings.sum_smaller_probs,
        force_topk=parts.settings.force_topk,
    )
    scheduler = Scheduler(
        SchedulerConfig(
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_blocks_per_seq=-(-config.max_model_len // BLOCK_TOKENS),
            prefill_attempt_interval=config.prefill_attempt_interval,
            nextn=config.nextn,
        ),
        BlockManager(config.num_blocks, config.num_pages, blocks_per_window(model)),
        _budget(parts, config, worker),
    )
    return EngineCore(
        Executor(worker, sampler, slots, _drafter(parts.settings, config.nextn, worker, sampler)),
        scheduler,
        parts.tokenizer,
        GrammarCompiler(parts.tokenizer, model.vocab_size, parts.settings),
        eos_token_id=model.eos_token_id,
        max_model_len=config.max_model_len,
        asynchronous=config.asynchronous,
    )


def _drafter(settings: Settings, nextn: int, worker: Worker, sampler: Sampler) -> Drafter | None:
    """What proposes drafts, if any are wanted."""
    if not nextn:
        return None
    temperatures = settings.confidence_temperatures
    if len(temperatures) not in (1, nextn):
        raise ConfigError(
            f"DEEPINFER_DFLASH_CONFIDENCE_HEAD_TEMPERATURE has {len(temperatures)} numbers; give "
            f"one, or {nextn} for nextn {nextn}"
        )
    if len(temperatures) == 1:
        temperatures *= nextn
    return Drafter(worker, sampler, temperatures)


def _budget(parts: Parts, config: EngineConfig, worker: Worker) -> DraftBudget | None:
    """What limits the drafts of a step, if that is switched on; measures step times first."""
    settings = parts.settings
    if not (config.nextn and settings.mtp_varlen):
        return None
    most = min(config.max_num_seqs * (config.nextn + 1), config.max_num_batched_tokens)
    rows = row_counts(most)
    files = None
    key = ""
    if settings.perf_cache_dir:
        files = CurveFiles(Path(settings.perf_cache_dir), settings.perf_cache_ttl)
        weights = "expanded" if parts.expanded else "packed"
        order = type(parts.arithmetic.order).__name__
        model = str(parts.checkpoint.directory)
        key = curve_key(model, rows, weights, order, torch.get_num_threads())
        known = files.load(key, rows)
        if known is not None:
            return DraftBudget(known)
    curve = measure_curve(worker, rows, config.max_num_seqs)
    worker.allocate(config.num_blocks - 1, config.max_num_seqs, config.num_pages - 1)
    if files is not None:
        files.save(key, curve)
    return DraftBudget(curve)
