"""Converts text to model inputs, and model outputs to text."""
