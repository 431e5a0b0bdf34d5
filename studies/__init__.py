"""Measurements and tables, each printed by a command: `python -m studies.NAME`."""
