"""The commands that ask a trained model for something: one file for each."""
