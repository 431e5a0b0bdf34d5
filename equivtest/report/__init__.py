"""What a run has shown: counted, written for the terminal, and written to files."""
