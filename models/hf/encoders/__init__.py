"""The encoders in Hugging Face's form."""
