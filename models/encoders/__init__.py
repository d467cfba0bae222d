"""Bidirectional models: each token attends to all tokens of the input."""
