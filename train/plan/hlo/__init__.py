"""Parses the text of compiled programs, and counts FLOPs, memory traffic and collectives."""
