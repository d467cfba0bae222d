"""Attention kernels of our own, whole and for the parts of a ring."""

KERNEL_RESIDUALS = "kernel_residuals"
"""The name under which rematerialization may keep what the backward pass of a kernel reads."""
