"""Orders of examples, which determine the batches."""
