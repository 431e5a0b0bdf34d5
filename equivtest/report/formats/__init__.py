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
"""Name of a format -> function that converts a run's report to it."""


def export(run: Run, name: str) -> str:
    """Converts the report of a run to the format with this name.

    Raises:
        Misuse: there is no such format.
    """
    if name not in FORMATS:
        raise Misuse(f"equivtest export: expected one of {', '.join(FORMATS)}, got {name!r}")
    return FORMATS[name](run)
