"""The parts that run a training: the step, its compilation, the loop, checkpoints, logs."""
