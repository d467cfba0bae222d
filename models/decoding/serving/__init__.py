"""Continuous batching for a server, where each text has its own settings."""
