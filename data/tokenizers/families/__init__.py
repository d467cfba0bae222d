"""Creates the tokenizers of model families from folders, in the same way as transformers 5."""
