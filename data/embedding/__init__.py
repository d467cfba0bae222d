"""Texts by columns: anchors, positives, negatives and scores, for models of sentence vectors."""
