"""Captures a step of your job in a folder, and judges the step later.

For each rank, the folder has a file of tensors and a manifest.
"""
