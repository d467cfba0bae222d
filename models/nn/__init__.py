"""Building blocks of the models: attention, masks, norms, feed-forward layers."""
