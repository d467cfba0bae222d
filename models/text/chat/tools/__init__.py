"""Tools that a model may call in a conversation, and what keeps them from doing harm."""
