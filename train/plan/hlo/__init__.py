"""Reading compiled programs."""
