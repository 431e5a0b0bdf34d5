"""Measures on ranks how a backend and its device compute, and writes a declaration for a person to sign."""
