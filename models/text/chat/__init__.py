"""Conversations with a model: the turns, the model's input, and the tool calls in its answers."""
