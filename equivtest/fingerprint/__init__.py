"""Measures in the ranks how a backend and its device compute, and writes it for a person to sign."""
