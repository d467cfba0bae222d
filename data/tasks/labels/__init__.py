"""Defines the labels of labeled data: their names and their types."""
