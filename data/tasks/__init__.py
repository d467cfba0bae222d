"""The kinds of data, with one file for each."""
