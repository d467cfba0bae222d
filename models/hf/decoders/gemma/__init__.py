"""The Gemmas in Hugging Face's format."""
