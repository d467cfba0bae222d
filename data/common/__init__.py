"""Contains what all three packages share: errors, files, JSON, lazy names, lines of progress."""
