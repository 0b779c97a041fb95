"""The oracle: the network as its papers would write it, for comparing everything else with."""

from deepinfer_neuron.reference.drafts import DraftBlock, Drafts
from deepinfer_neuron.reference.network import (
    LayerTrace,
    Mix,
    Network,
    Trace,
    forward,
    greedy_tokens,
    lowest_maximum,
)
from deepinfer_neuron.reference.primitives import PlainPrimitives, Primitives
from deepinfer_neuron.reference.rounding import Rounding

__all__ = [
    "DraftBlock",
    "Drafts",
    "LayerTrace",
    "Mix",
    "Network",
    "PlainPrimitives",
    "Primitives",
    "Rounding",
    "Trace",
    "forward",
    "greedy_tokens",
    "lowest_maximum",
]
