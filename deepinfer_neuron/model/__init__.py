"""The modules of the network."""
