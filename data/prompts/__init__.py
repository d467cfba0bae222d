"""Prompts that show a task by examples, and the sources of such examples."""
