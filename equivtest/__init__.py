"""Checks that a parallel computation is the unsharded one, and finds the smallest case where it is not."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("equivtest")
except PackageNotFoundError:  # run from a source tree that is not installed
    __version__ = "0+source"
