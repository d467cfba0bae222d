"""Reads and writes run folders on disk."""
