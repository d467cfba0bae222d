"""Losses on vectors of texts, as pure functions of `Vectors`."""
