"""Reads collections for retrieval: documents, queries, and the relevant documents per query."""
