"""Imports and exports models, and averages checkpoints."""
