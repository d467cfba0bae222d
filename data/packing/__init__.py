"""Packing of documents and sentence pairs into sequences, and the arrays of the sequences."""
