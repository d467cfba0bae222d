"""Readers of text and records."""
