"""Files that are the user's own, and files of Python, of packages and of equivtest."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from equivtest.base import users_code
from equivtest.base.users_code import imported_after, imported_files, is_users, users_frames


@pytest.mark.parametrize("prefix", [sys.prefix, sys.base_prefix])
def test_file_beside_the_folders_of_an_environment_counts_as_user_code(prefix: str) -> None:
    assert is_users(str(Path(prefix, "plan.py"))) and is_users(str(Path(prefix, "src", "app", "plan.py")))


@pytest.mark.parametrize("file", [json.__file__, torch.__file__, users_code.__file__, "<string>", "plan.so"])
def test_file_of_python_a_package_or_equivtest_is_not_user_code(file: str) -> None:
    assert not is_users(file)


def test_traceback_frames_in_user_code_are_found() -> None:
    files = (__file__, json.__file__, "/home/me/plan.py")
    lines = [line for file in files for line in (f'  File "{file}", line 3, in f', "    f()")]

    found = users_frames(lines)

    assert {number: match[1] for number, match in found.items()} == {0: __file__, 4: "/home/me/plan.py"}


def test_imported_files_of_the_user_are_those_of_the_modules_that_exist_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = imported_files()
    monkeypatch.setitem(sys.modules, "late_plan", module := ModuleType("late_plan"))
    module.__file__ = str(tmp_path / "late_plan.py")
    twice = imported_files(), imported_files()
    monkeypatch.delitem(sys.modules, "late_plan")

    assert twice == (tuple(sorted((*before, module.__file__))),) * 2
    assert imported_files() == before


def test_modules_imported_after_a_module_are_named_without_earlier_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    last = next(reversed(sys.modules))
    for name in ("late_plan", "later_plan"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))

    assert imported_after(last) == ["later_plan", "late_plan"]
    assert imported_after("later_plan") == []
