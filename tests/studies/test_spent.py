"""What a run says of the time that its tests took."""

from __future__ import annotations

import re

import pytest

BUSY = """
import subprocess, sys, time

def test_it():
    subprocess.run([sys.executable, "-c", "import time\\nwhile time.process_time() < 0.5: pass"])
"""


def test_the_time_of_a_process_below_a_test_is_the_tests(pytester: pytest.Pytester) -> None:
    """In the line of the sum, of the file and of the test."""
    pytester.makepyfile(BUSY)
    result = pytester.runpytest_inprocess("-p", "studies.spent", "-p", "no:cacheprovider")
    found = [float(line.split()[0]) for line in result.outlines if re.match(r" +\d+\.\d +\d+\.\d  ", line)]

    assert len(found) == 3 and min(found) >= 0.5
