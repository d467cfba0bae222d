"""Rewards of completions, computed by functions of texts or by reward models."""
