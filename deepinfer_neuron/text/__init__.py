"""The words: token ids from text, and text from token ids."""

from __future__ import annotations

from deepinfer_neuron.text.detokenizer import IncrementalDetokenizer
from deepinfer_neuron.text.tokenizer import Tokenizer

__all__ = ["IncrementalDetokenizer", "Tokenizer"]
