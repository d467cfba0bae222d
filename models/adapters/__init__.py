"""Adapters: a few trained parameters that are added to a frozen model."""
