"""The decoders in the Hugging Face format."""
