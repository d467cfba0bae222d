"""What all three packages use: errors, files, JSON, lazy names, lines of progress."""
