"""Integrates equivtest into pytest: its options, its items, and what happens in a session."""
