"""Data for embedding models and rerankers: anchors with positives, negatives and scores."""
