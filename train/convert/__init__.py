"""Imports, exports and averages weights."""
