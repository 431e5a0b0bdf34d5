"""Proves, or refutes with a minimal case, that a parallel computation is the unsharded one."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("equivtest")
except PackageNotFoundError:  # run from a source tree that is not installed
    __version__ = "0+source"
