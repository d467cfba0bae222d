"""Search for texts by the vectors of a model."""
