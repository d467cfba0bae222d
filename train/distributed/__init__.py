"""Training on several devices and processes: shardings, launching, attention kernels."""
