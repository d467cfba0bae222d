"""The GPTs: decoders with LayerNorm, biases, and one head of keys and values per query head."""
