"""The encoder-decoders in Hugging Face's form."""
