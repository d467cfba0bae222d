"""The command line: `main` calls the commands in `training` and `inference`."""
