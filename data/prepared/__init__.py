"""Sequences tokenized and packed in advance, as shards on disk."""
