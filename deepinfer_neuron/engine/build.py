"""Puts an engine together from an opened checkpoint."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from deepinfer_neuron.cache.blocks import BlockManager
from deepinfer_neuron.cache.pools import BLOCK_TOKENS
from deepinfer_neuron.checkpoint.reader import Checkpoint
from deepinfer_neuron.engine.budget import DraftBudget
from deepinfer_neuron.engine.config import EngineConfig, blocks_per_window, check_integer
from deepinfer_neuron.engine.core import EngineCore
from deepinfer_neuron.engine.layout import Layout
from deepinfer_neuron.engine.placement import measure, place
from deepinfer_neuron.engine.scheduler import Scheduler, SchedulerConfig
from deepinfer_neuron.engine.step_times import CurveFiles, curve_key, measure_curve, row_counts
from deepinfer_neuron.errors import ConfigError
from deepinfer_neuron.ops.arithmetic import Arithmetic
from deepinfer_neuron.platform import Platform
from deepinfer_neuron.platform.simulator.cost import trn2_core
from deepinfer_neuron.runner.buckets import Ladder
from deepinfer_neuron.runner.drafter import LOWEST_TEMPERATURE, Drafter
from deepinfer_neuron.runner.executor import StepWorker
from deepinfer_neuron.runner.host_executor import HostExecutor
from deepinfer_neuron.runner.static_executor import StaticExecutor
from deepinfer_neuron.runner.static_worker import StaticWorker
from deepinfer_neuron.runner.warm_up import warm_up
from deepinfer_neuron.runner.worker import Worker, blocks_for
from deepinfer_neuron.sampling.grammar import GrammarCompiler
from deepinfer_neuron.sampling.sampler import Sampler
from deepinfer_neuron.settings import Settings
from deepinfer_neuron.text.tokenizer import Tokenizer

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Parts:
    """The parts an engine shares with its caller."""

    checkpoint: Checkpoint
    tokenizer: Tokenizer
    settings: Settings
    arithmetic: Arithmetic
    expanded: bool | None
    """Whether quantized weights are decoded once; ``None`` leaves it to the placement of a device,
    which decodes what shortens a step within the memory that is left."""
    platform: Platform
    progress: bool
    """Show a bar while loading."""


def build_engine(parts: Parts, config: EngineConfig) -> EngineCore:
    """Load the network, allocate its caches, and wire scheduler, executor and sampler."""
    model = parts.checkpoint.config
    sampler = Sampler(
        model.vocab_size,
        parts.arithmetic,
        blacklist=parts.settings.blacklisted_tokens(model.vocab_size),
        sum_smaller_probs=parts.settings.sum_smaller_probs,
        force_topk=parts.settings.force_topk,
    )
    make = _static_executor if parts.platform.graph else _host_executor
    executor = make(parts, config, sampler)
    scheduler = Scheduler(
        SchedulerConfig(
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_blocks_per_seq=-(-config.max_model_len // BLOCK_TOKENS),
            prefill_attempt_interval=config.prefill_attempt_interval,
            nextn=config.nextn,
        ),
        BlockManager(config.num_blocks, config.num_pages, blocks_per_window(model)),
        _budget(parts, config, executor.worker),
    )
    return EngineCore(
        executor,
        scheduler,
        parts.tokenizer,
        GrammarCompiler(parts.tokenizer, model.vocab_size, parts.settings),
        eos_token_id=model.eos_token_id,
        max_model_len=config.max_model_len,
        asynchronous=config.asynchronous,
    )


def _host_executor(parts: Parts, config: EngineConfig, sampler: Sampler) -> HostExecutor:
    """Ragged steps on the host."""
    worker = Worker(
        parts.checkpoint,
        parts.arithmetic,
        expanded=bool(parts.expanded),
        max_length=config.max_model_len,
        progress=parts.progress,
        nextn=config.nextn,
        backtracking=_backtracking(parts.settings),
    )
    worker.allocate(config.num_blocks - 1, config.max_num_seqs, config.num_pages - 1)
    drafter = None
    if config.nextn:
        drafter = Drafter(worker, sampler, _temperatures(parts.settings, config.nextn))
    return HostExecutor(worker, sampler, config.max_num_seqs + 1, drafter)


def _static_executor(parts: Parts, config: EngineConfig, sampler: Sampler) -> StaticExecutor:
    """Passes of static shape on the platform's device, all of them compiled."""
    ladder = Ladder.build(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=config.max_model_len,
        nextn=config.nextn,
        lowest_prefill=config.buckets.prefill_rows,
        lowest_width=blocks_for(min(config.buckets.context, config.max_model_len)),
    )
    worker = StaticWorker(
        parts.checkpoint,
        parts.arithmetic,
        parts.platform,
        parts.platform.make_regions(),
        ladder,
        expanded=_expanded(parts, config),
        max_length=config.max_model_len,
        nextn=config.nextn,
        backtracking=_backtracking(parts.settings),
        temperatures=_temperatures(parts.settings, config.nextn) if config.nextn else (),
        host_embed=parts.settings.host_embed,
        progress=parts.progress,
    )
    worker.allocate(config.num_blocks - 1, config.max_num_seqs, config.num_pages - 1)
    if config.buckets.warm_up_seconds != 0:
        done = warm_up(
            worker, budget_seconds=config.buckets.warm_up_seconds, progress=parts.progress
        )
        if not done.complete:
            _log.warning(
                "warm-up stopped after %.0f s with %d of %d passes; the others compile when they "
                "are first needed",
                done.seconds, done.passes, done.passes + len(done.missing),
            )  # fmt: skip
    return StaticExecutor(worker, sampler, config.max_num_seqs + 1)


def _expanded(parts: Parts, config: EngineConfig) -> bool | frozenset[str]:
    """Which matrices a device holds expanded.

    Raises :class:`ConfigError` where the model does not fit into its memory.
    """
    if parts.expanded is not None:
        return parts.expanded
    model = parts.checkpoint.config
    layout = Layout(
        cores=1, ep=1, cp=1, nextn=config.nextn, max_model_len=config.max_model_len,
        max_num_seqs=config.max_num_seqs, max_num_batched_tokens=config.max_num_batched_tokens,
        dense="replicated", host_embed=parts.settings.host_embed,
    )  # fmt: skip
    core = replace(trn2_core(), hbm_bytes=parts.platform.total_memory_bytes())
    placement = place(model, layout, core)
    if placement is None:
        missing = measure(model, layout, core).missing
        raise ConfigError(
            f"the model does not fit on one core of {core.hbm_bytes / 2**30:.0f} GiB: "
            f"{missing / 2**30:.2f} GiB are missing. 'inspect --plan' shows where the memory "
            "goes; lower max_num_seqs or max_model_len, or use device 'cpu'."
        )
    return placement.step.path.matrices


def _backtracking(settings: Settings) -> int:
    return check_integer(
        "DEEPINFER_MAX_BACKTRACKING_TOKENS", settings.backtracking_tokens, 0, 65536
    )


def _temperatures(settings: Settings, nextn: int) -> tuple[float, ...]:
    """Divisors of the confidence logits, one per draft."""
    temperatures = settings.confidence_temperatures
    if len(temperatures) not in (1, nextn):
        raise ConfigError(
            f"DEEPINFER_DFLASH_CONFIDENCE_HEAD_TEMPERATURE has {len(temperatures)} numbers; give "
            f"one, or {nextn} for nextn {nextn}"
        )
    if len(temperatures) == 1:
        temperatures *= nextn
    return tuple(max(value, LOWEST_TEMPERATURE) for value in temperatures)


def _budget(parts: Parts, config: EngineConfig, worker: StepWorker) -> DraftBudget | None:
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
        weights = {True: "expanded", False: "packed", None: "planned"}[parts.expanded]
        order = f"{type(parts.arithmetic.order).__name__} on {parts.platform.name}"
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
