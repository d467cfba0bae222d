"""Packs documents and sentence pairs into sequences, and converts the sequences to arrays."""
