"""The parts of objectives: the `Objective` record, losses, metrics and the evaluation step."""
