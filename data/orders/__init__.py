"""Orders examples, which determines the examples of each batch."""
