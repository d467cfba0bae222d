"""The Gemmas in the Hugging Face format."""
