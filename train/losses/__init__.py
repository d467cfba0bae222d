"""The parts of objectives: the record `Objective`, losses, metrics and the evaluation step."""
