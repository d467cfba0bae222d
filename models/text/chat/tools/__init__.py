"""Tools that a model may call in a conversation, and the isolation of programs that they run."""
