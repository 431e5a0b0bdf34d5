"""Runs ranks on other hosts, with the hub of a run and the slots that torchrun starts."""
