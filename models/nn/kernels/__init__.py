"""Attention kernels of this package, for whole sequences and for the shards of ring attention."""

KERNEL_RESIDUALS = "kernel_residuals"
"""A rematerialization policy can use this name to save a kernel's residuals."""
