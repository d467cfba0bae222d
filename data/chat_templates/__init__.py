"""Chat templates run in a sandbox, within bounds, and know who wrote each character."""
