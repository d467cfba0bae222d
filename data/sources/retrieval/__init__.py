"""Collections for retrieval: documents, queries, and which documents are relevant to a query."""
