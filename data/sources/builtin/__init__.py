"""Generated data that need no download."""
