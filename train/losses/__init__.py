"""What objectives are made of: the record `Objective`, losses, metrics and the evaluation step."""
