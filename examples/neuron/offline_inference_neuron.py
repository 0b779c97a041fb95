"""Text generation on a Neuron core: text prompts, a fixed pool of cache blocks, greedy decoding.

    python examples/neuron/offline_inference_neuron.py --model DIR --device neuron
    python examples/neuron/offline_inference_neuron.py --model DIR --simulate   # no chip needed

Nothing here has been measured on a chip. The simulated device computes on the host: it enforces
the device's rules and gives the host's tokens, slowly.
"""

from __future__ import annotations

import argparse
import sys

from deepinfer_neuron import LLM, SamplingParams
from deepinfer_neuron.cli.engine_options import add_device_options, buckets_of, device_of
from deepinfer_neuron.cli.main import guarded

PROMPTS = ["The capital of France is", "Explain in one sentence why the sky is blue."]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--model", metavar="DIR", help="checkpoint directory (default: the demo model)"
    )
    parser.add_argument("--prompt", action="append", metavar="TEXT", help="repeatable")
    parser.add_argument("--max-tokens", type=int, default=16, metavar="N")
    parser.add_argument("--max_model_len", type=int, metavar="N", help="prompt plus output")
    parser.add_argument("--max_num_seqs", type=int, default=2, metavar="N", help="run together")
    parser.add_argument("--max_num_batched_tokens", type=int, metavar="N", help="rows of a step")
    parser.add_argument("--num_blocks", type=int, metavar="N", help="of 128 tokens, one reserved")
    parser.add_argument("--nextn", type=int, metavar="N", help="drafts per step, 0 for none")
    add_device_options(parser)  # --device, --simulate, --compile and the buckets
    args = parser.parse_args()
    # Everything is allocated and compiled here: the first request finds all graphs ready.
    llm = LLM(
        args.model,
        device=device_of(args),
        simulate=args.simulate or None,
        compile=args.compile,
        buckets=buckets_of(args),
        max_model_len=args.max_model_len,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        num_blocks=args.num_blocks,  # the pool of the KV caches never grows
        nextn=args.nextn,
        progress=sys.stderr.isatty(),
    )
    with llm:
        params = SamplingParams(temperature=0.0, max_tokens=args.max_tokens)
        for output in llm.generate(args.prompt or PROMPTS, params, use_tqdm=sys.stderr.isatty()):
            completion = output.outputs[0]
            print(f"{output.prompt!r} -> {completion.text!r} ({completion.finish_reason})")
        print(llm.stats().device or "no graphs: every step ran operator by operator")
    return 0


if __name__ == "__main__":
    sys.exit(guarded(main))
