"""The tokenizers of families, as transformers 5 makes them from a folder."""
