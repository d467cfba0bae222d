"""Where text and records come in."""
