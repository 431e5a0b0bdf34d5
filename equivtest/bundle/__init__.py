"""Packs the verdicts of a run into one file for you to hand in, and checks such a file."""
