"""The options of a run, as a plugin of pytest: `-p equivtest.options`, or named by a conftest.py.

from equivtest.options import pytest_addoption
"""

from equivtest.pytest_plugin.options import pytest_addoption

__all__ = ["pytest_addoption"]
