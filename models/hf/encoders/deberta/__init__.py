"""The Hugging Face forms of DeBERTa."""
