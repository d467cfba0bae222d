"""A conversation with a model: turns, their text, and what is read of it."""
