"""Generates sequences from next-token scores, by sampling or beam search."""
