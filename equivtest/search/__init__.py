"""Draws cases, runs and judges them, and shrinks a case that fails."""
