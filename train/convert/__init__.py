"""Moving weights in and out."""
