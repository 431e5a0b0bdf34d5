"""Limits, names of functions for other processes, files and plain data, which all other packages may import."""
