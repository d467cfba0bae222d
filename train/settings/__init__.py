"""The settings of a run as a user gives them: in Python, in a file, and on the command line."""
