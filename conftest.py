"""Set-up for this repository alone: the suite's options for the whole run, and pytest's fixtures for tests of plugins.

The plugin itself comes through its entry point; loading it here too would load it twice.
"""

from equivtest.options import pytest_addoption

__all__ = ["pytest_addoption"]

pytest_plugins = ["pytester"]
