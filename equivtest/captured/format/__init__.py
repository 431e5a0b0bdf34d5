"""Reads and writes the files of a captured run; files are read as if a hostile author had written them."""
