"""Hugging Face forms of the decoders in the tradition of GPT-2."""
