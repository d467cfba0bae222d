"""Defines the kinds of data, each in a separate file."""
