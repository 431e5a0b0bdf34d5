"""Writes the tensors that the ranks of a job hold into a folder."""
