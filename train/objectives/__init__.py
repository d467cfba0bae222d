"""The training objectives. Each objective has hyperparameters, a loss and metrics."""
