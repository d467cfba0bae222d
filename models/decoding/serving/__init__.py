"""Continuous batching for a server, where each text has individual settings."""
