"""The kinds of data, one file each."""
