"""Devices and processes: shardings, launching, attention kernels."""
