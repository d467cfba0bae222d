"""Renders chat templates in a sandbox with limits, and records who wrote each character."""
