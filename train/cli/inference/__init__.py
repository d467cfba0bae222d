"""The commands that use a trained model, one file each."""
