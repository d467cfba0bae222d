"""Tokenizes and packs sequences before training, and stores them in shards on disk."""
