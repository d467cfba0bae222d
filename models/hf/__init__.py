"""The bridge to Hugging Face's form: weights, configurations, generation settings."""
