"""Converts a report to the formats of other tools."""

from __future__ import annotations

from collections.abc import Callable

from equivtest.errors import Misuse
from equivtest.report.formats.ctrf import as_ctrf
from equivtest.report.formats.github import as_annotations, as_markdown
from equivtest.report.formats.relay import as_outputs
from equivtest.report.log import Run

FORMATS: dict[str, Callable[[Run], str]] = {
    "annotations": as_annotations,
    "markdown": as_markdown,
    "ctrf": as_ctrf,
    "pytorch": as_outputs,
}


def export(run: Run, name: str) -> str:
    if name not in FORMATS:
        raise Misuse(f"equivtest export: expected one of {', '.join(FORMATS)}, got {name!r}")
    return FORMATS[name](run)
