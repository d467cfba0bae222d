"""Reads text and records from the sources that a name describes."""
