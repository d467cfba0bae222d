"""Tokenized text as arrays on disk."""
