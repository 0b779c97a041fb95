"""Attention over segments of different lengths."""
