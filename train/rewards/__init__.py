"""Computes the rewards of completions by functions of texts or by reward models."""
