"""Turning next-token scores into sequences: sampling and beam search."""
