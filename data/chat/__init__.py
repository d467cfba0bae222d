"""Conversations: messages, their rendering as one text, and the tokens to learn."""
