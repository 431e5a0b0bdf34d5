"""Judges the values of a captured run."""
