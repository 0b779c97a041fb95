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


class DeviceRuleError(PlatformError):
    """Something was asked of the Neuron device that it cannot do, or does badly.

    Args:
        rule: id of the rule, such as ``G08``.
        title: what the rule says.
        detail: what broke it: the operator, its shapes, or a count.
        where: file and line of the Python code, if known.
        workaround: what to do instead.
    """

    def __init__(self, rule: str, title: str, detail: str, where: str, workaround: str) -> None:
        place = f" (at {where})" if where else ""
        super().__init__(f"{rule}: {title}. Found: {detail}{place}. Instead: {workaround}")
        self.rule = rule
        self.title = title
        self.detail = detail
        self.where = where
        self.workaround = workaround

    def __reduce__(self) -> tuple[type[DeviceRuleError], tuple[str, str, str, str, str]]:
        fields = (self.rule, self.title, self.detail, self.where, self.workaround)
        return type(self), fields
