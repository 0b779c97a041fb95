"""Greedy decoding with drafts, compared with golden tokens of the reference computation.

Without a model it runs the demo model of the package. Or make a checkpoint with its golden tokens
and run that:

    deepinfer-neuron tiny --out tiny --golden
    python examples/neuron/run_deepinfer_tiny.py --model tiny --nextn 5
    python examples/neuron/run_deepinfer_tiny.py --model tiny --nextn 5 --simulate

Prints how many of the golden tokens came out for a short and for a long prompt, and exits with 1 if
any did not.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from deepinfer_neuron import LLM, SamplingParams
from deepinfer_neuron.assets import model_or_demo
from deepinfer_neuron.cli.engine_options import add_device_options, buckets_of, device_of
from deepinfer_neuron.cli.main import guarded
from deepinfer_neuron.reference import golden


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--model", type=Path, metavar="DIR", help="checkpoint directory (default: the demo model)"
    )
    parser.add_argument("--nextn", type=int, metavar="N", help="drafts per step, 0 for none")
    add_device_options(parser)
    args = parser.parse_args()
    return guarded(lambda: run(args))


def run(args: argparse.Namespace) -> int:
    model = model_or_demo(args.model)
    prompts = golden.load(model)
    wrong = 0
    with LLM(
        model,
        device=device_of(args),
        simulate=args.simulate or None,
        compile=args.compile,
        buckets=buckets_of(args),
        nextn=args.nextn,
        max_model_len=1024,
        max_num_seqs=1,
        max_num_batched_tokens=256,
    ) as llm:
        for prompt in prompts:
            params = SamplingParams(
                temperature=0.0, max_tokens=len(prompt.token_ids), ignore_eos=True
            )
            output = llm.generate(
                {"prompt_token_ids": prompt.prompt_token_ids}, params, use_tqdm=False
            )[0]
            tokens = output.outputs[0].token_ids
            right = sum(a == b for a, b in zip(tokens, prompt.token_ids, strict=True))
            wrong += len(tokens) - right
            print(
                f"{right}/{len(prompt.token_ids)} golden tokens "
                f"({prompt.name} prompt, {len(prompt.prompt_token_ids)} tokens; "
                f"{output.metrics.decode.tokens_per_step:.2f} tokens per decode step)"
            )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
