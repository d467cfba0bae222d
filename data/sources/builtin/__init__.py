"""Generated data, which need no download."""
