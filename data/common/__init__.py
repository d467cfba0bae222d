"""Shared by all three packages: errors, files, JSON, lazy names, lines of progress."""
