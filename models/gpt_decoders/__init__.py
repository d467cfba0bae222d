"""Decoders in the tradition of GPT-2: LayerNorm, biases, one head of keys for each of queries."""
