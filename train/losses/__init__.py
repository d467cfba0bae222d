"""What objectives are made of: the `Objective` record, losses, metrics and the evaluation step."""
