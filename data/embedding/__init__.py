"""Data for embedding models and rerankers: anchors, positives, negatives and scores."""
