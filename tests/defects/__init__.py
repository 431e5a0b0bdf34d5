"""Subjects that are wrong in one way each; a property counts only if it rejects them."""
