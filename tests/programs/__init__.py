"""Programs that ranks run in tests, right ones and wrong ones."""
