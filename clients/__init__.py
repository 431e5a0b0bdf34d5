"""Other people's parallel programs, judged by equivtest: `make clients`."""
