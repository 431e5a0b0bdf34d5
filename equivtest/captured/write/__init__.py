"""Copies the tensors of a job's ranks while a step runs, and writes them to a folder."""
