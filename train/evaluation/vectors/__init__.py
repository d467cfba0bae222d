"""Scores vectors in retrieval, in reranking and on text pairs, with BM25 for comparison."""
