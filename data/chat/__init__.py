"""Data for post-training: conversations, preferences and prompts."""
