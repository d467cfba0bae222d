"""Provides the records of published data sets, with one interface for all kinds of data sets."""
