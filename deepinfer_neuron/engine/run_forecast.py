"""Estimated times of a whole run, prompt and decode steps, on Trainium cores. Not a measurement."""

from __future__ import annotations

from dataclasses import dataclass

from deepinfer_neuron.checkpoint.config import ModelConfig
from deepinfer_neuron.engine.config import EngineConfig, check_integer
from deepinfer_neuron.engine.forecast import Forecast, decode_shape, forecast
from deepinfer_neuron.engine.layout import MOST_CORES, Layout, default_ep
from deepinfer_neuron.engine.placement import place
from deepinfer_neuron.model.shapes import PassShape
from deepinfer_neuron.platform.simulator.cost import LABEL, CoreSpec, trn2_core
from deepinfer_neuron.runner.worker import blocks_for


@dataclass(frozen=True)
class RunForecast:
    """Estimated times of prompts that run together.

    Attributes:
        cores: that the model is spread over.
        fits: whether the layout fits; if not, nothing is expanded.
        decode: one step of all sequences, in the middle of their output.
        prompt: the passes of one prompt, in order.
        tokens_per_step: tokens of a decode step and sequence; taken from a run, not estimated.
    """

    cores: int
    fits: bool
    decode: Forecast
    prompt: tuple[Forecast, ...]
    tokens_per_step: float
    label: str = LABEL

    @property
    def step_ms(self) -> float:
        """One decode step."""
        return self.decode.milliseconds

    @property
    def tpot_ms(self) -> float:
        """Time per output token: a step over its tokens."""
        return self.step_ms / self.tokens_per_step

    @property
    def ttft_ms(self) -> float:
        """Time to first token of a prompt that nothing waits before: all of its passes."""
        return sum(part.milliseconds for part in self.prompt)


def forecast_run(
    config: ModelConfig,
    limits: EngineConfig,
    *,
    cores: int,
    host_embed: bool,
    input_len: int,
    output_len: int,
    batch: int,
    tokens_per_step: float,
    core: CoreSpec | None = None,
) -> RunForecast:
    """Estimate a run.

    Args:
        config: the model.
        limits: of the engine whose shapes are estimated.
        cores: to spread the model over; dense matrices are whole on each.
        host_embed: the token embedding is in host memory.
        input_len: tokens of every prompt.
        output_len: tokens that every prompt generates.
        batch: sequences that run together.
        tokens_per_step: accepted tokens of a decode step and sequence.
        core: rates; Trainium2 if left out.

    Raises:
        ConfigError: ``cores`` is out of range.
    """
    core = trn2_core() if core is None else core
    layout = Layout(
        cores=check_integer("cores", cores, 1, MOST_CORES),
        ep=default_ep(config, cores, limits.nextn),
        cp=1,
        nextn=limits.nextn,
        max_model_len=limits.max_model_len,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        dense="replicated",
        host_embed=host_embed,
    )
    context = input_len + output_len // 2
    placement = place(config, layout, core, context=context)
    spare = 0 if placement is None else placement.expanded_bytes + placement.unused
    decode = forecast(config, layout, decode_shape(config, layout, batch, context), spare, core)
    # Matrices are expanded once, for decode steps; a prompt finds them as they are.
    prompt = tuple(
        forecast(config, layout, shape, spare, core, decode.path)
        for shape in _prompt_passes(config, layout, input_len)
    )
    return RunForecast(cores, placement is not None, decode, prompt, tokens_per_step)


def _prompt_passes(config: ModelConfig, layout: Layout, tokens: int) -> list[PassShape]:
    """Shapes of the chunks of a prompt that has the step to itself."""
    ladder, most = layout.ladder(config), layout.max_num_batched_tokens
    ends = [*range(most, tokens, most), tokens]
    return [
        ladder.prefill_shape(end - start, blocks_for(end))
        for start, end in zip([0, *ends[:-1]], ends, strict=True)
    ]
