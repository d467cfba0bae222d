"""From the lengths of documents to packed rows."""
