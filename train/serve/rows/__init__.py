"""Work on single texts, which is batched over requests: vectors, scores, labels, translations."""
