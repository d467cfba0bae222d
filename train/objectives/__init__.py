"""The training objectives, each with its hyperparameters, its loss and its metrics."""
