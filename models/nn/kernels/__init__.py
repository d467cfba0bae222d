"""Attention kernels of our own, and the random draws that they share with XLA."""
