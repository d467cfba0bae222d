"""Orders of examples that decide which of them share a batch."""
