"""The Gemmas: decoders that scale their embeddings by √D."""
