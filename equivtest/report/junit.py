"""Merges JUnit XML files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

from equivtest.errors import Misuse, shorten

COUNTED = {"errors": "error", "failures": "failure", "skipped": "skipped"}
"""Attribute of a test suite that counts test cases -> name of the element that these test cases contain."""


def merge_junit(files: Sequence[Path]) -> bytes:
    """Returns one JUnit file with the tests of all `files`.

    A test in several files occurs once in the result, and failed if it failed in any of these files.

    Raises:
        Misuse: a file is no valid JUnit XML.
    """
    roots = [_root(file) for file in files]
    cases: dict[tuple[str | None, str | None], ElementTree.Element] = {}
    for case in (case for root in roots for case in root.iter("testcase")):
        key = case.get("classname"), case.get("name")
        if key not in cases or case.find("failure") is not None:
            cases[key] = case
    suites = [suite for root in roots for suite in root.iter("testsuite")]
    merged = ElementTree.Element("testsuites", roots[0].attrib)
    suite = ElementTree.SubElement(merged, "testsuite", suites[0].attrib if suites else {})
    suite.set("tests", str(len(cases)))
    suite.set("time", f"{sum(float(each.get('time', '0')) for each in suites):.3f}")
    for name, element in COUNTED.items():
        suite.set(name, str(sum(case.find(element) is not None for case in cases.values())))
    suite.extend(cases.values())
    return bytes(ElementTree.tostring(merged, encoding="utf-8", xml_declaration=True))


def _root(file: Path) -> ElementTree.Element:
    try:
        return ElementTree.parse(file).getroot()
    except (ElementTree.ParseError, ValueError) as error:
        raise Misuse(f"{shorten(str(file))} is broken: {error}: write the report again") from error
