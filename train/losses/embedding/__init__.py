"""Losses of text vectors: pure functions of `Vectors`."""
