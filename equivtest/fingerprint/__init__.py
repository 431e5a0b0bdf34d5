"""Measures on ranks how a backend and its device compute, and writes a declaration of it for a person to sign."""
