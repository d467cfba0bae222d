"""Plans a run for devices that need not be present, and times its train step on local devices."""
