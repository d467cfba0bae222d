"""The encoders in the Hugging Face format."""
