"""What is judged: one folder per family, found by its name; see `equivtest.cases.parts`."""
