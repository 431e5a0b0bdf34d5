"""The families of subjects under test: one folder each, found by its name; see `equivtest.cases.parts`."""
