"""Reads the text of compiled programs: their instructions, matmuls, memory and collectives."""
