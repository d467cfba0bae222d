"""Evaluates finished runs on data: metrics, predictions and rewards."""
