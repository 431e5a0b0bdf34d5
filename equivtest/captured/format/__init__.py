"""The files of a captured run, read as if a hostile author had written them."""
