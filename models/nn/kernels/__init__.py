"""Attention kernels of our own, whole and for the parts of a ring."""
