"""Adapters: few parameters that are trained beside those of a frozen model."""
