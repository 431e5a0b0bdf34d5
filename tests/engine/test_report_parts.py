"""The picture of a module's parts in the report."""

from __future__ import annotations

import re
from pathlib import Path

from equivtest.captured.format.folder import CapturedRun
from equivtest.captured.judge.run import judge_run
from equivtest.report.files import write_picture
from equivtest.report.parts import PartTree, Shown
from tests.programs.captured import captured, more


def test_submodules_are_listed_below_their_parents_in_the_order_of_their_calls() -> None:
    tree = PartTree()
    tree.add({"boundary.layers.0.up": 0.5, "boundary.norm": 0.25, "grad.boundary.layers.0.up#2[1]": 0.75}, "")
    tree.add({"boundary.layers.0.up": 0.125, "step2.boundary.layers.1:attention[2]": 0.25}, "")

    assert tree.rows() == [
        (0, "layers", None, None),
        (1, "0", None, None),
        (2, "up", Shown("held", "0.5"), Shown("held", "0.75")),
        (1, "1", None, None),
        (2, ":attention", Shown("held", "0.25"), None),
        (0, "norm", Shown("held", "0.25"), None),
    ]


def test_tree_of_submodules_marks_the_first_wrong_submodule() -> None:
    tree = PartTree()
    tree.add({"boundary.a": 0.5, "boundary.b": None, "boundary.c": 3.0, "boundary.d": 2.0}, "boundary.c")
    tree.add({"boundary.a": None, "boundary.b": None}, "")

    assert [(name, forward) for _, name, forward, _ in tree.rows()] == [
        ("a", Shown("open", "0.5 1 of 2 open")),
        ("b", Shown("open", "2 of 2 open")),
        ("c", Shown("begins", "begins here: 3")),
        ("d", Shown("wrong", "2")),
    ]


def test_report_page_of_a_captured_run_marks_the_first_wrong_submodule(tmp_path: Path) -> None:
    captured(tmp_path / "wrong", more)
    judged = judge_run(CapturedRun(tmp_path / "wrong"), "tests.programs.captured:blocks")
    write_picture(tmp_path / "page.html", [("<run>", judged.parts())])
    page = (tmp_path / "page.html").read_text()

    assert re.findall(r'--depth: 1">(.*?)<.*?class="begins">begins here: \S+?<', page) == ["down"]
    assert page.count('class="held"') > 10 and "&lt;run&gt;" in page and "://" not in page
