"""The encoder-decoders in the Hugging Face format."""
