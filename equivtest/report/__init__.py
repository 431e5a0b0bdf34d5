"""Counts the results of a run, and writes them to the terminal and to files."""
