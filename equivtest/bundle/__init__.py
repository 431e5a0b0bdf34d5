"""Packs the verdicts of a run into one file, a bundle, for you to hand in, and checks such a file."""
