"""Measurements of this package; each module that is named in ``docs/benchmarks.md`` is a script."""
