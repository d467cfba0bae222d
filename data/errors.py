"""The one exception of this package that is meant for the person at the keyboard."""


class DataError(ValueError):
    """Bad input: one line that names the thing, the value seen and the remedy."""
