"""Training objectives with their hyperparameters, losses and metrics."""
