"""Right and wrong programs that ranks run in tests."""
