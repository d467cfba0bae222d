"""Prompts: the log-probabilities of answers, and the accuracy by the number of examples."""
