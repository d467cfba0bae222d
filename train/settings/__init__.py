"""The settings of a run, which a user gives in Python, in a file, or on the command line."""
