"""Objectives: losses to minimize and scores to report."""
