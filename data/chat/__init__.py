"""Conversations: messages, the templates that make one text of them, and what a model learns."""
