"""Stores tokenized text as arrays on disk."""
