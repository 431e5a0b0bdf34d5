"""Subjects of this family that are wrong in one way each."""
