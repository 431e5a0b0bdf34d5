"""Finds the cause of a failure: a collective, a kernel, an operator on DTensors, or the parallelization."""
