"""The command line ``deepinfer-neuron``."""
