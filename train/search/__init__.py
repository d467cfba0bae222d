"""Searches texts by comparing the vectors of a model."""
