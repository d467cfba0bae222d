"""Attention kernels of this package, for whole sequences and for the parts of a ring."""

KERNEL_RESIDUALS = "kernel_residuals"
"""The name of a kernel's residuals, which rematerialization may save."""
