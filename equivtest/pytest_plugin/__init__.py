"""Integrates equivtest into pytest with options, items and hooks of a session."""
