"""Selects the records of a source that are used: conditions on fields, and stored selections."""
