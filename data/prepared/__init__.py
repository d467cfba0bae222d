"""Rows that were tokenized and packed beforehand, as shards on disk."""
