"""Ensembles, word vectors, and answers in turn, as the lectures describe them."""
