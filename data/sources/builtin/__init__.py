"""Generates data, so that no download is necessary."""
