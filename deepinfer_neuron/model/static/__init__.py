"""The network over passes of static shape, as regions that a graph compiler takes.

The modules and operators are those of the ragged network beside it; what differs is how rows are
addressed. A *pass* holds ``S`` sequences of ``Q`` rows each, so every tensor has a shape that
follows from its :class:`~deepinfer_neuron.model.shapes.PassShape` alone. Rows and sequences that
are not needed are padding: they read and write block 0, page 0 and slot 0, which no sequence owns.
"""
