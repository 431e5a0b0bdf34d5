"""Finds the cases of a user's program that can be judged."""
