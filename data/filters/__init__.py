"""Selects which records of a source are used, by conditions on fields or by a classifier."""
