"""The options, items and session of a run under pytest."""
