"""Work on single texts that is put together into batches: vectors, scores, labels, translations."""
