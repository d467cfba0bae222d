"""The GPTs and the decoders that derive from them."""
