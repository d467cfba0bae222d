"""Losses on text vectors, as pure functions of `Vectors`."""
