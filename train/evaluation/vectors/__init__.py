"""Scores of vectors: retrieval, reranking, pairs of texts, and BM25 as the reference."""
