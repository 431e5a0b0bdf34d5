"""One embedding divided in two ways, beside each other."""
