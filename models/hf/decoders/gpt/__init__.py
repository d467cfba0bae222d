"""Hugging Face forms of the decoders that follow GPT-2."""
