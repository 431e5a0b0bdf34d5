"""Reads and writes the files of a captured run. A file may come from an attacker, so its content is checked."""
