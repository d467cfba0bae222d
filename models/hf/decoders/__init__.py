"""The decoders in Hugging Face's form."""
