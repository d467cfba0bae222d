"""A batch for a server, whose texts have different settings."""
