"""Code that all three packages share: errors, fields, files, JSON, lazy names and progress."""
