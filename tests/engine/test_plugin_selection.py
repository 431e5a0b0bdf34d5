"""pytest's own choices, which `equivtest run` passes on: --lf, --ff, -x, -k and --junit-xml."""

from __future__ import annotations

import sys
from xml.etree import ElementTree

import hypothesis  # noqa: F401  (what runs in this process import is dropped behind each, and torch dies of it)
import pytest

from equivtest import cli
from equivtest.errors import Misuse
from equivtest.pytest_plugin.pytest_run import run_properties
from tests.engine.fake_suite import log_of, make_suite


def run_command(pytester: pytest.Pytester, *args: str) -> list[str]:
    """Runs `equivtest run` on the fake suite; returns its searches, in order."""
    (pytester.path / "log").unlink(missing_ok=True)
    fixed = ("-n0", "--audit=off", "--known-failures=none", "--world-sizes=2,3")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["equivtest", "run", ".", *fixed, *args])
        with pytest.raises(SystemExit):
            cli.main()
    return [line.removesuffix(" gate") for line in log_of(pytester) if line.startswith("search")]


def test_options_lf_and_ff_run_failed_searches_again(pytester: pytest.Pytester) -> None:
    make_suite(pytester, "a", "a_wrong")
    everything = run_command(pytester)

    last_failed = run_command(pytester, "--lf")
    first_failed = run_command(pytester, "--ff", "--junit-xml=j.xml", "-x")

    assert everything == ["search a w2", "search a_wrong w2", "search a w3", "search a_wrong w3"]
    assert last_failed == first_failed == ["search a_wrong w3"]
    assert "a_wrong[w3-0]" in {case.get("name") for case in ElementTree.parse(pytester.path / "j.xml").iter("testcase")}


def test_options_lf_and_ff_without_paths_of_test_files_raise_misuse() -> None:
    with pytest.raises(Misuse, match=r"--lf and --ff need the paths of your own test files"):
        run_properties({}, [], "0", None, ["--lf"])


def test_option_k_selects_properties_by_their_claims(pytester: pytest.Pytester) -> None:
    make_suite(pytester, "a", "b")

    assert run_command(pytester, "-k", "b and agrees_on_all_ranks") == ["search b w2", "search b w3"]
    assert run_command(pytester, "-k", "repeats_itself") == []
