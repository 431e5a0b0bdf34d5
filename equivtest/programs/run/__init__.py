"""Runs a user's program on a rank."""
