"""The training engine: the step, its compilation, the loop, checkpoints and logs."""
