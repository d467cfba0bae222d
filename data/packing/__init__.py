"""Plans packed sequences, and makes their arrays."""
