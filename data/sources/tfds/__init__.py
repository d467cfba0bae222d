"""Reads and writes data sets of tensorflow-datasets."""
