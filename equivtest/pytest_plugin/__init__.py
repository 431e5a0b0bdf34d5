"""Integrates equivtest into pytest: options, items and hooks of a session."""
