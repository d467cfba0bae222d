"""A conversation with a model: its turns, their text, and the parsing of answers."""
