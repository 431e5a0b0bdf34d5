"""Limits, names across process borders, files and plain data, which every room imports."""
