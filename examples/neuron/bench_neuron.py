"""TTFT, TPOT, step time and tokens per decode step of random prompts on a Neuron core.

    python examples/neuron/bench_neuron.py --model DIR --device neuron --nextn 5
    python examples/neuron/bench_neuron.py --model DIR --simulate --input-len 100 --output-len 8

With --simulate the times are those of the host that plays the device; what counts there are the
numbers per decode step. The predicted times are estimates for a chip, not measurements.
"""

from __future__ import annotations

import argparse
import sys

from deepinfer_neuron import LLM
from deepinfer_neuron.cli.benchmark import Workload, measure
from deepinfer_neuron.cli.engine_options import add_engine_options, engine_arguments
from deepinfer_neuron.cli.main import guarded
from deepinfer_neuron.cli.output import print_json


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_engine_options(parser)  # --model, --nextn, --weights, --device, --simulate, buckets
    parser.add_argument("--input-len", type=int, default=512, metavar="N", help="prompt tokens")
    parser.add_argument("--output-len", type=int, default=128, metavar="N", help="per prompt")
    parser.add_argument("--batch", type=int, default=1, metavar="N", help="run together")
    parser.add_argument("--max-num-batched-tokens", type=int, metavar="N", help="rows of a step")
    parser.add_argument("--cores", type=int, default=1, metavar="N", help="of the prediction")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args()
    workload = Workload(args.input_len, args.output_len, args.batch)
    with LLM(
        args.model,
        **engine_arguments(args),
        max_num_seqs=args.batch,
        max_num_batched_tokens=args.max_num_batched_tokens,
        max_model_len=args.input_len + args.output_len,
        enable_prefix_caching=False,  # every run computes its prompts
    ) as llm:
        run = measure(llm, workload, cores=args.cores)
    if args.json:
        print_json(run.record())
    else:
        run.show()
    return 0


if __name__ == "__main__":
    sys.exit(guarded(main))
