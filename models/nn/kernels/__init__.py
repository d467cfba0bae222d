"""Attention kernels of our own."""
