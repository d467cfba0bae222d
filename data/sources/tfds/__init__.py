"""Readers of data sets of tensorflow-datasets."""
