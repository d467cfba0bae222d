"""The tensors of Hugging Face files: names, layouts, and the parameters that they store."""
