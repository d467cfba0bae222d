"""Models whose tokens see all tokens of the input."""
