"""The commands that prepare, train, measure and convert models, one file each."""
