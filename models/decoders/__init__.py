"""Models that predict each next token from the tokens before it."""
