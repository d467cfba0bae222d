"""Renders chat templates in a sandbox, within bounds, and records who wrote each character."""
