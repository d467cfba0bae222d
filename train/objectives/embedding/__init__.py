"""Objectives for training embedding models."""
