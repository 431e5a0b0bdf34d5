"""Finds what a failure comes from: a collective, a kernel, an operator on DTensors, or the parallelization."""
