"""Modules that all other packages may import, such as limits, names of functions, and writing of files."""
