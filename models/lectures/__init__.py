"""Variants of attention from the lectures that no published family uses."""
