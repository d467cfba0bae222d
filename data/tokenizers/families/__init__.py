"""The tokenizers of the model families, as transformers 5 makes them from a folder."""
