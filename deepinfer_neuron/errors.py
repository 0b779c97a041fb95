"""Every error a user can meet.

All of them derive from :class:`DeepInferNeuronError`, so the command line prints one sentence
instead of a traceback and an embedding program can catch the whole family. A message names what
was given, what is allowed, and what to do about it.
"""

from __future__ import annotations


class DeepInferNeuronError(Exception):
    """Base of every error that this package raises on purpose."""


class ConfigError(DeepInferNeuronError, ValueError):
    """A ``config.json`` (or an engine setting) holds a value that cannot be served."""


class CheckpointError(DeepInferNeuronError):
    """The files of a checkpoint are missing, damaged, or do not hold what the model needs."""


class TokenizerError(DeepInferNeuronError):
    """The tokenizer files are unreadable or disagree with the model's configuration."""


class RequestError(DeepInferNeuronError, ValueError):
    """A prompt or a sampling parameter is outside what the engine accepts."""


class PlatformError(DeepInferNeuronError, RuntimeError):
    """The requested device or one of its packages is not usable on this machine."""
