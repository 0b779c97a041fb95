"""The same text with and without drafts, and how much faster drafts make it.

    python examples/neuron/drafts_on_and_off.py

Runs the demo model of the package unless another checkpoint is named. Prints every continuation
once, says whether both ways agree, and compares tokens per second at batch 1.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass

from deepinfer_neuron import LLM, SamplingParams
from deepinfer_neuron.errors import DeepInferNeuronError

PROMPTS = (
    "And it came to pass in those days, that",
    "And Jesus answered and said unto them,",
    "Now the sons of Israel were",
)


@dataclass(frozen=True)
class Run:
    """All prompts one after the other."""

    texts: list[str]
    tokens: int
    seconds: float
    tokens_per_step: float

    @property
    def speed(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds


def run(model: str | None, nextn: int | None, prompts: list[str], max_tokens: int) -> Run:
    """Complete the prompts at temperature 0; the first one also warms up, unmeasured."""
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    # Fixed-order arithmetic: with it drafts do not change a single bit of the result.
    with LLM(model, nextn=nextn, max_num_seqs=1, batch_invariant=True) as llm:
        llm.generate(prompts[0], params, use_tqdm=False)
        start = time.perf_counter()
        outputs = [llm.generate(prompt, params, use_tqdm=False)[0] for prompt in prompts]
        seconds = time.perf_counter() - start
        tokens_per_step = llm.stats().decode.tokens_per_step
    completions = [output.outputs[0] for output in outputs]
    tokens = sum(len(completion.token_ids) for completion in completions)
    return Run([completion.text for completion in completions], tokens, seconds, tokens_per_step)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", metavar="DIR", help="default: the demo model of the package")
    parser.add_argument("--prompt", action="append", metavar="TEXT", help="repeatable")
    parser.add_argument("--max-tokens", type=int, default=64, metavar="N")
    args = parser.parse_args()
    prompts = args.prompt or list(PROMPTS)
    try:
        off = run(args.model, 0, prompts, args.max_tokens)
        on = run(args.model, None, prompts, args.max_tokens)
    except DeepInferNeuronError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for prompt, text in zip(prompts, on.texts, strict=True):
        print(f"{prompt}\033[1m{text}\033[0m\n" if sys.stdout.isatty() else f"{prompt}{text}\n")
    same = sum(a == b for a, b in zip(on.texts, off.texts, strict=True))
    print(f"same text with and without drafts: {same} of {len(prompts)}")
    print(f"drafts off  {off.speed:7.1f} tokens/s")
    print(
        f"drafts on   {on.speed:7.1f} tokens/s, {on.tokens_per_step:.2f} tokens per decode step, "
        f"{on.speed / off.speed:.2f} times as fast"
    )
    return 0 if same == len(prompts) else 1


if __name__ == "__main__":
    sys.exit(main())
