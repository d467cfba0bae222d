"""Reads texts by columns: anchors, positives, negatives and scores, for embedding models."""
