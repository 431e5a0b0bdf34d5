"""The hash seed that a command gives its process."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PROGRAM = """
from equivtest.base.hash_seed import fix_hash_seed
fix_hash_seed()
import os, sys
print(os.environ["PYTHONHASHSEED"], sys.flags.hash_randomization)
"""


@pytest.mark.parametrize(
    ("set_by_user", "printed"),
    [({}, "0 0"), ({"PYTHONHASHSEED": "random"}, "random 1"), ({"PYTHONHASHSEED": "7"}, "7 1")],
    ids=["unset", "random", "number"],
)
def test_process_gets_hash_seed_0_unless_the_user_sets_one(set_by_user: dict[str, str], printed: str) -> None:
    names = {name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"}

    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=names | set_by_user, capture_output=True, text=True, timeout=60, check=True
    )

    assert done.stdout == f"{printed}\n"
