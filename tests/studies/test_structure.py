"""The path of a value through the modules of a package."""

from __future__ import annotations

from pathlib import Path

from studies.structure import Walk, num_returns

STREET = """
from equivtest.errors import require
from equivtest.made import made
from equivtest.shown import shown

def main(run, words):
    require(run)
    case = made(run)
    for line in [case]:
        shown(line)
    shown(words)
"""

ZIGZAG = """
from equivtest.shown import shown

def made(run):
    shown(run)
    return own(run)

def own(run):
    return run
"""


def path_of(folder: Path, made: str) -> list[str]:
    (folder / "street.py").write_text(STREET)
    (folder / "errors.py").write_text("def require(run): pass\n")
    (folder / "shown.py").write_text("def shown(line): pass\n")
    (folder / "made.py").write_text(made)
    walk = Walk(folder)
    walk.follow("street", "main", "run")
    return walk.modules


def test_call_path_that_enters_each_module_once_has_no_returns(tmp_path: Path) -> None:
    path = path_of(tmp_path, "def made(run): return run\n")

    assert (path, num_returns(path)) == (["street", "made", "shown"], 0)


def test_call_path_counts_a_return_for_each_module_that_is_entered_again(tmp_path: Path) -> None:
    path = path_of(tmp_path, ZIGZAG)

    assert (path, num_returns(path)) == (["street", "made", "shown", "made", "shown"], 2)
