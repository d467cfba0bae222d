"""What drives a run: the step, its compilation, the loop, checkpoints, logs."""
