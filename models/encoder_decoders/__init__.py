"""Models that write a target for a source."""
