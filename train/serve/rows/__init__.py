"""Computes vectors, scores, labels and translations of texts, batched over several requests."""
