"""Plain access to files."""
