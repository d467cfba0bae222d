"""The labels of labeled data: their names and their targets."""
