"""Plans a run for devices that need not be present, and times its step on local devices."""
