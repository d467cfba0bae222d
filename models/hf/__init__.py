"""Converts weights, configurations and generation settings from and to the Hugging Face format."""
