"""Ranks on other hosts: the hub of a run, and the slots that torchrun starts."""
