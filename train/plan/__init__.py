"""Whether a run fits devices that are not here, and how fast a step is."""
