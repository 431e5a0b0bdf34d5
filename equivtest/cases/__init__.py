"""What the families share: cases, values, what is right, subjects and defects."""
