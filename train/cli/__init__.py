"""The command line: `main` calls the commands, which lie in two rooms."""
