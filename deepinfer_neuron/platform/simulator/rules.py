"""The rules of the device: what it cannot do, computes wrongly, or does slowly.

Each rule has an id under which errors and reports name it. ``check`` says where the simulated
device looks for a violation:

* ``eager``: at every operator that is called outside a region;
* ``entry``: at the arguments and results of a region;
* ``graph``: in the captured graph of a region;
* ``run``: on values, while a region runs;
* ``step``: in the counts of a step, when it ends;
* ``memory``: at every allocation;
* ``collective``: at every collective operation;
* ``ranks``: in the reports of all ranks, side by side;
* ``start``: in the environment of the process;
* ``none``: only a device shows it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Severity = Literal["error", "wrong", "speed", "memory"]
Check = Literal[
    "eager", "entry", "graph", "run", "step", "memory", "collective", "ranks", "start", "none"
]


@dataclass(frozen=True)
class Rule:
    """One rule: what goes wrong without it, where it is checked, and what to do instead."""

    id: str
    severity: Severity
    check: Check
    title: str
    workaround: str


_GRAPHS = (
    Rule("G01", "error", "graph", "every dimension of a graph is static",
         "pad to a bucket, and mask instead of selecting"),
    Rule("G02", "speed", "entry", "nothing compiles after warm-up",
         "warm this shape up, or round it to a bucket that was"),
    Rule("G03", "error", "entry", "torch gives up on a method with too many graphs",
         "use fewer buckets, or raise the number of graphs that a method may have"),
    Rule("G04", "speed", "entry", "a region is compiled once per signature, for all its modules",
         "read no per-layer Python value inside a region; make it a buffer or an argument"),
    Rule("G05", "wrong", "ranks", "all ranks capture the same graphs",
         "read the rank from a buffer, never from Python"),
    Rule("G06", "speed", "graph", "a region is one graph without a break",
         "use operators that can be traced, and no Python side effects"),
    Rule("G07", "error", "graph", "no value of a tensor decides what Python does",
         "use masks and where, and loops of fixed length"),
    Rule("G08", "error", "entry", "rows of sparse attention come in powers of two",
         "pad with empty rows to the next power of two"),
    Rule("G09", "error", "graph", "2-byte matrices have even widths",
         "pad the width to a multiple of two, better of 32"),
    Rule("G10", "error", "graph", "slices are contiguous, without a step",
         "reshape to [..., n / 2, 2] and unbind, or stack and flatten"),
    Rule("G11", "error", "graph", "a graph stays below the compiler's instruction limit",
         "one layer per region, or fewer rows per launch"),
    Rule("G12", "speed", "step", "a step launches few regions",
         "merge neighbouring regions of a layer"),
    Rule("G13", "error", "entry", "inputs of a graph are contiguous",
         "keep caches layer-major and pass one contiguous view per layer"),
    Rule("G14", "speed", "entry", "inputs of a graph are tensors, not Python numbers",
         "pass a device tensor, or a frozen dataclass of sizes"),
    Rule("G15", "speed", "entry", "inputs of a graph live on the device",
         "move the tensor to the device beforehand"),
    Rule("G16", "speed", "entry", "inputs and outputs of a graph have at most 32 bits",
         "cast to int32 inside the region, and keep int32 buffers"),
    Rule("G17", "wrong", "graph", "an input written in place is written whole",
         "pass the view of this layer itself and write it with index_put_ or index_copy_"),
    Rule("G18", "error", "start", "a failing graph stops the program",
         "set TORCH_NEURONX_DISABLE_FALLBACK_EXECUTION=1"),
    Rule("G19", "wrong", "ranks", "all ranks launch the same regions with the same shapes",
         "derive buckets from numbers that all ranks know"),
    Rule("G20", "error", "graph", "a graph talks to few different groups of ranks",
         "use the world group"),
    Rule("G21", "speed", "none", "failed compilations may be cached",
         "one cache directory per toolchain; clear it after a failure"),
    Rule("G22", "wrong", "none", "times taken during compilations mean nothing",
         "warm up, leave, and run again"),
    Rule("G23", "error", "none", "kernel and compiler versions belong together",
         "pin exact versions"),
)  # fmt: skip

_ARITHMETIC = (
    Rule("D01", "error", "graph", "trn2 has no float8_e4m3fn",
         "keep the codes as uint8 and decode them by table or bit operations"),
    Rule("D02", "error", "eager", "fp8 casts do not compile outside regions",
         "cast inside a region, or emulate the format on 32-bit floats"),
    Rule("D03", "error", "graph", "there are no 4-bit floats and no ue8m0 arithmetic",
         "nibbles in uint8 with a table of 16 values; scales as exponent bytes"),
    Rule("D04", "wrong", "graph", "numbers have at most 32 bits",
         "int32 with values below 2**31 and float32; say dtype= to sums and ranges"),
    Rule("D05", "error", "graph", "products and reductions across rows or ranks take floats only",
         "cast to float32 and keep magnitudes below 2**24"),
    Rule("D06", "wrong", "graph", "integer floor division goes through floats",
         "torch.div(..., rounding_mode='trunc') on non-negative numbers, or shifts"),
    Rule("D07", "error", "graph", "integers cannot be sorted",
         "sort float32 keys, exact below 2**24"),
    Rule("D08", "error", "graph", "shifts need 32-bit operands",
         "widen to int32 first"),
    Rule("D09", "error", "graph", "interleaved int32 slices cannot be narrowed to int16",
         "compute lo + 256 * hi in float32 and cast once"),
    Rule("D10", "memory", "graph", "gathers from large byte tables widen the table",
         "view the rows as int32 and use embedding, then view back"),
    Rule("D11", "wrong", "graph", "sums of booleans and gathers over wide axes go wrong",
         "cast booleans to float32 or int32 first; select by where or embedding"),
    Rule("D12", "wrong", "none", "the order of equal keys in topk and sort is open",
         "make keys unique"),
    Rule("D13", "wrong", "start", "no automatic casts, no stochastic rounding",
         "set NEURON_RT_STOCHASTIC_ROUNDING_EN=0 and give no --auto-cast but none"),
    Rule("D14", "wrong", "none", "transcendental functions come from tables",
         "compare with a tolerance"),
    Rule("D15", "wrong", "graph", "integer powers and powers of two go through logarithms",
         "x * x; powers of two by the exponent bits of a float"),
    Rule("D16", "error", "graph", "there are no complex numbers",
         "pairs of real and imaginary parts"),
    Rule("D17", "wrong", "none", "casting copies go through float32",
         "copy integers without a cast"),
    Rule("D18", "error", "graph", "there is no random number generator",
         "the counter-based generator of the sampler"),
)  # fmt: skip

_MEMORY = (
    Rule("M01", "error", "memory", "everything of a rank fits the memory of its core",
         "fewer cache blocks, or weights spread over more ranks"),
    Rule("M02", "memory", "memory", "no single large allocation in a step",
         "allocate once at load; keep only this rank's rows of a table"),
    Rule("M03", "memory", "graph", "weights are decoded in chunks of bounded size",
         "decode a block of output rows at a time"),
    Rule("M04", "memory", "none", "the pool of the allocator fragments",
         "allocate the large buffers first and once"),
    Rule("M05", "memory", "run", "a graph fits with its results and what it keeps in between",
         "fewer rows per launch, or smaller caches"),
    Rule("M06", "memory", "none", "the scratch space is contiguous",
         "set NEURON_RT_CONTIGUOUS_SCRATCHPAD=0 if it cannot grow"),
    Rule("M07", "memory", "collective", "a collective moves at most 512 MiB",
         "split it"),
    Rule("M08", "memory", "none", "what a core does not need stays on the host",
         "keep the vision tower in host memory"),
    Rule("M09", "memory", "graph", "weights are inputs of a graph, never constants",
         "register them as buffers or parameters"),
)  # fmt: skip

_HOST = (
    Rule("H01", "speed", "eager", "a blocking copy waits for everything that is queued",
         "one upload and one download per step, through the platform"),
    Rule("H02", "speed", "none", "asynchronous copies are valid after a synchronization only",
         "wait for a download before reading it"),
    Rule("H03", "speed", "eager", "a Python number in an operator is one more upload",
         "prepare constants on the device, or compute inside a region"),
    Rule("H04", "speed", "eager", "operators without a kernel run on the host",
         "compute inside a region"),
    Rule("H05", "speed", "eager", "64-bit integers are cast on the host",
         "int32 indices and dtype=torch.int32"),
    Rule("H06", "speed", "step", "each new shape of an operator compiles",
         "transform weights on the host and upload the result"),
    Rule("H07", "speed", "step", "few operators run outside regions",
         "compute inside a region"),
    Rule("H08", "error", "eager", "casts and transposed copies fail outside regions on some builds",
         "cast and transpose on the host, or inside a region"),
    Rule("H09", "speed", "eager", "writes into strided tensors go through the host",
         "index_copy_ inside a region"),
    Rule("H10", "speed", "none", "the token embedding is looked up on the device",
         "leave DEEPINFER_NEURON_HOST_EMBED off"),
    Rule("H11", "speed", "eager", "logits stay on the device",
         "sample on the device and download ids"),
    Rule("H12", "speed", "none", "a step starts before the one before is read",
         "take token ids of the last step on the device"),
    Rule("H13", "speed", "none", "processes are pinned to the node of their chip",
         "set the CPU affinity of every rank"),
    Rule("H14", "error", "none", "layouts change on the host",
         "transpose before the upload"),
)  # fmt: skip

_FORMS = (
    Rule("L01", "speed", "graph", "no assignment to every second element",
         "view(..., d / 2, 2), rotate, stack(-1).flatten(-2)"),
    Rule("L02", "error", "none", "transposed views inside a region may not compile",
         "contiguous() after the transposition"),
    Rule("L03", "error", "run", "indices are within their table",
         "clamp inside the mask, and pad with 0, not with -1"),
    Rule("L04", "wrong", "none", "padding rows write to slot 0",
         "give slot 0 of every pool to nobody"),
    Rule("L05", "speed", "graph", "no one-hot matrices over large vocabularies",
         "gather"),
    Rule("L06", "error", "entry", "no empty tensors",
         "at least one row"),
    Rule("L07", "error", "graph", "tensors are contiguous, or as they were",
         "leave memory_format alone"),
    Rule("L08", "speed", "none", "conversions from packed formats cost vector time",
         "keep decoded weights where they fit"),
    Rule("L09", "speed", "none", "custom kernels stop fusion around them",
         "plain operators first"),
    Rule("L10", "speed", "none", "products over less than 128 elements waste the matrix unit",
         "scale weights first, then one product"),
)  # fmt: skip

_RANKS = (
    Rule("C01", "error", "start", "one process per core",
         "set NEURON_RT_VISIBLE_CORES to the core of this rank"),
    Rule("C02", "error", "collective", "there is no broadcast",
         "one all-reduce to which the others add zeros, or the host's group"),
    Rule("C03", "error", "collective", "all-to-all takes equal splits only",
         "local experts on all rows and one all-reduce, or a fixed capacity"),
    Rule("C04", "error", "collective", "there is no send, no receive, no barrier of a subgroup",
         "all-reduce, or the host's group"),
    Rule("C05", "error", "collective", "groups are contiguous ranks in powers of two",
         "use the world group"),
    Rule("C06", "speed", "none", "a small all-reduce costs its latency",
         "at most one per sublayer"),
    Rule("C07", "speed", "collective", "collectives on a second stream stall graphs",
         "synchronous collectives, inside regions"),
    Rule("C08", "wrong", "ranks", "all ranks run all collectives",
         "ranks without work run them on empty rows"),
    Rule("C09", "speed", "none", "collectives are sent in buckets",
         "leave the default"),
    Rule("C10", "speed", "collective", "control messages do not use the device",
         "the host's group"),
    Rule("C11", "speed", "none", "a two-level all-reduce gains nothing",
         "one group"),
)  # fmt: skip

RULES: dict[str, Rule] = {
    rule.id: rule for rule in (*_GRAPHS, *_ARITHMETIC, *_MEMORY, *_HOST, *_FORMS, *_RANKS)
}
"""Every rule by its id."""


def rules_table() -> str:
    """The catalogue as a Markdown table."""
    lines = ["| id | | checked | rule | instead |", "|---|---|---|---|---|"]
    for rule in RULES.values():
        where = "device only" if rule.check == "none" else rule.check
        cells = (rule.id, rule.severity, where, rule.title, rule.workaround)
        lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return "\n".join(lines)
