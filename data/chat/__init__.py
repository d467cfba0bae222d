"""Data for post-training: conversations, preferences and prompts as tokens to learn from."""
