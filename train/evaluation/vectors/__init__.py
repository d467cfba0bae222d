"""Scores of vectors in retrieval, in reranking and on pairs of texts, with BM25 for comparison."""
