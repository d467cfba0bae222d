"""Turns text into model inputs, and model outputs into text."""
