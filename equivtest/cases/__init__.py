"""What all families have in common: cases, the drawing of values, and functions that subjects share."""
