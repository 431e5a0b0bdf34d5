"""Makes the options of the conformance suite available to every pytest run of these properties."""

from equivtest.options import pytest_addoption

__all__ = ["pytest_addoption"]
