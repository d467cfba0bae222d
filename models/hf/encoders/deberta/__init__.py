"""DeBERTa in the Hugging Face format."""
