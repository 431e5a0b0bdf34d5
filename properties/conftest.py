"""Options of the conformance suite: they exist wherever these properties are run."""

from equivtest.options import pytest_addoption

__all__ = ["pytest_addoption"]
