"""What to try: cases, the strategies that draw them, and the values that their seeds stand for."""
