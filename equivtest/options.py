"""The options of a run, as a plugin of pytest: load it with `-p equivtest.options`, or import it in a conftest.py:

from equivtest.options import pytest_addoption
"""

from equivtest.pytest_plugin.options import pytest_addoption

__all__ = ["pytest_addoption"]
