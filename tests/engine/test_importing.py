"""Names of code that cannot be found: where they were searched for, and similar names."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from equivtest.base.importing import load_named
from equivtest.errors import Misuse

NAMES = ("hidden", "near_by", "asking")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder, the current one and the first on Python's path; what is imported from it is forgotten."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in NAMES:
        sys.modules.pop(name, None)


def told(name: str) -> str:
    importlib.invalidate_caches()
    with pytest.raises(Misuse) as raised:
        load_named(name, "build")
    return str(raised.value)


def test_message_names_a_package_that_shadows_a_module_of_the_same_name(here: Path) -> None:
    (here / "hidden").mkdir()
    (here / "hidden/__init__.py").write_text("def decoder(): ...")
    (here / "hidden.py").write_text("def encoder(): ...")

    assert told("hidden:encoder") == (
        "build 'hidden:encoder' cannot be imported: module 'hidden' has no attribute 'encoder': the module is "
        f"{here}/hidden/__init__.py; it hides {here}/hidden.py: rename one of the two; did you mean 'decoder'?; "
        "write package.module:NAME"
    )


def test_message_names_a_folder_that_shadows_a_module_in_the_working_directory(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder without __init__.py is a module too, if no other is found."""
    (here / "hidden").mkdir()
    (here / "work").mkdir()
    (here / "work/hidden.py").write_text("def encoder(): ...")
    monkeypatch.chdir(here / "work")

    assert (
        f"the module is the folder {here}/hidden, which has no __init__.py; it hides {here}/work/hidden.py: rename one "
        f"of the two, and put {here}/work on PYTHONPATH" in told("hidden:encoder")
    )


def test_error_for_a_misspelt_function_name_suggests_a_similar_name(here: Path) -> None:
    (here / "near_by.py").write_text("def encoder(): ...\ndef sharded(): ...")

    assert f"has no attribute 'encodr': the module is {here}/near_by.py; did you mean 'encoder'?" in told(
        "near_by:encodr"
    )
    assert "it defines encoder, sharded; write package.module:NAME" in told("near_by:whole")


def test_error_for_a_misspelt_module_name_suggests_a_similar_name(here: Path) -> None:
    (here / "near_by.py").write_text("")

    assert f"No module named 'nearby' in {here} or elsewhere on Python's path: did you mean near_by?" in told(
        "nearby:f"
    )


def test_message_on_a_missing_module_of_equivtest_names_the_changelog() -> None:
    """Replay files and cases written before a move name the old module."""
    message = told("equivtest.families.module.case_gated:gated_block")

    assert "modules of equivtest have moved, see CHANGELOG.md; write package.module:NAME" in message


def test_name_within_a_module_that_is_no_package_is_refused(here: Path) -> None:
    (here / "near_by.py").write_text("")

    assert "No module named 'near_by.sub'; 'near_by' is not a package; write package" in told("near_by.sub:f")
    assert told(".near_by:f").endswith("relative import for '.near_by'; write package.module:NAME")


def test_failed_import_within_a_module_is_reported_as_an_error_of_that_module(here: Path) -> None:
    (here / "asking.py").write_text("import no_such_module_anywhere")

    assert told("asking:f") == (
        "build 'asking:f' cannot be imported: ModuleNotFoundError: No module named 'no_such_module_anywhere'; "
        "fix the module, which raises this at import"
    )


def test_module_that_exits_at_import_is_reported(here: Path) -> None:
    (here / "exiting.py").write_text("raise SystemExit(3)")

    assert told("exiting:f").endswith("SystemExit: 3; fix the module, which raises this at import")


def test_error_for_a_module_in_place_of_a_function_shows_the_correct_syntax(here: Path) -> None:
    (here / "hidden").mkdir()
    (here / "hidden/encoder.py").write_text("")

    assert "hidden.encoder is a module: did you mean hidden.encoder:NAME?" in told("hidden:encoder")
