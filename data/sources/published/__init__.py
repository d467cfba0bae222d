"""Provides the records of published data sets: the interface, its implementations, and opening."""
