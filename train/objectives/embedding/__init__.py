"""Objectives that learn vectors of texts."""
