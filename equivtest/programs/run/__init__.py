"""Runs your program on a rank."""
