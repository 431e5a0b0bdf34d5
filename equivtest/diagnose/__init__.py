"""Finds the collective, the kernel or the program that a failure comes from."""
