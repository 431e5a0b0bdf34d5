"""What a backend and its device do with numbers: measured in the ranks, and written for a person to sign."""
