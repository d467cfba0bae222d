"""Training objectives, their losses, and the scores of predictions."""
