"""The decoders that follow GPT-2, in the Hugging Face format."""
