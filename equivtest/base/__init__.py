"""Provides what all other packages may import: limits, names of functions for other processes, files, plain data."""
