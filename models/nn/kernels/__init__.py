"""Attention kernels of this package, for whole sequences and for the shards of ring attention."""

KERNEL_RESIDUALS = "kernel_residuals"
"""The name by which a rematerialization policy may save a kernel's residuals."""
