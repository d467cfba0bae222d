"""Models that generate a target sequence from a source sequence."""
