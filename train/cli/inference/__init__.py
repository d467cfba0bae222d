"""The commands that use a trained model: one file for each, or for two that are alike."""
