"""Captures a step of a user's job in a folder, and judges it later.

The folder has a file of tensors and a manifest for each rank.
"""
