"""The uses of a trained model; one file per command."""
