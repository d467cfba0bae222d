"""Serves models over HTTP, with OpenAI's interface."""
