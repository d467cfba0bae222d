"""From the lengths of documents to packed sequences."""
