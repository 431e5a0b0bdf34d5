"""Converts a report to annotations of a step of GitHub Actions, and to the step's summary.

Sources: GitHub's "Workflow commands for GitHub Actions" limits the summary to 1 MiB. In actions/toolkit, `command.ts`
lists the characters that a command escapes, and the documentation of problem matchers limits a step to 10 errors.
"""

from __future__ import annotations

import os
from pathlib import Path

from equivtest.report.formats.results import Result, cut_bytes, results_in
from equivtest.report.log import Run
from equivtest.report.text import totals

MAX_ANNOTATIONS = 10
MAX_ANNOTATION_BYTES = 4096
MAX_SUMMARY_BYTES = 1024 * 1024 - 1024  # of 1 MiB, with room for the last line
MAX_MESSAGE_BYTES = 8 * 1024


def as_annotations(run: Run) -> str:
    """Returns GitHub's workflow commands, with one error for each subject with a failing claim."""
    by_subject: dict[str, list[Result]] = {}
    for result in results_in(run, ("failed",)):
        by_subject.setdefault(result.listed.subject, []).append(result)
    lines = [_annotation(run, subject, results) for subject, results in by_subject.items()][:MAX_ANNOTATIONS]
    return "".join(f"{line}\n" for line in lines)


def _annotation(run: Run, subject: str, results: list[Result]) -> str:
    first = results[0]
    claims = ", ".join(dict.fromkeys(result.claim for result in results))
    place = {"file": _path(run, first.listed.path), "title": f"equivtest: {subject}: {claims}"}
    if first.line is not None:
        place["line"] = str(first.line)
    where = ",".join(f"{name}={_escaped(value, ':,')}" for name, value in place.items())
    return f"::error {where}::{_escaped(cut_bytes(first.text, MAX_ANNOTATION_BYTES))}"


def _path(run: Run, path: str) -> str:
    """Returns the path relative to the checkout, as GitHub requires.  A path outside the checkout stays unchanged."""
    whole = Path(str(run.environment.get("rootdir", "")), path)
    checkout = os.environ.get("GITHUB_WORKSPACE") or os.getcwd()
    return str(whole.relative_to(checkout)) if whole.is_relative_to(checkout) else path


def _escaped(text: str, also: str = "") -> str:
    """Escapes characters that would end a workflow command, and the characters of `also`."""
    for char in f"%\r\n{also}":
        text = text.replace(char, f"%{ord(char):02X}")
    return text


def as_markdown(run: Run) -> str:
    environment, tallies = run.environment, run.results.ordered()
    failed = results_in(run, ("failed",))
    parts = [
        f"## equivtest: {len(failed) or 'no'} claim{'s' * (len(failed) > 1)} failed\n",
        f"torch {environment['torch']}, {environment['backend']}, profile {environment['profile']}\n",
        "\n".join(totals(tallies, environment["seconds"])) + "\n",
        _table(run),
    ]
    for result in failed:
        parts.append(_failure(result))
    text = "\n".join(parts)
    if len(text.encode()) > MAX_SUMMARY_BYTES:
        text = f"{cut_bytes(text, MAX_SUMMARY_BYTES)}\n```````\n\nThe rest is in report.html.\n"
    return text


def _table(run: Run) -> str:
    lines = ["| property | hold | failed | known to fail | open |", "|---|---|---|---|---|"]
    for tally in run.results.ordered():
        outcomes = [claim.outcome for claim in tally.claims()]
        counts = [outcomes.count(each) for each in ("passed", "failed", "xfailed", "skipped")]
        lines.append(f"| {_cell(tally.listed.name)} | {' | '.join(map(str, counts))} |")
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return text.replace("\\", "\\\\").replace("|", "\\|")


def _failure(result: Result) -> str:
    fence = "`" * 7
    message = cut_bytes(result.text, MAX_MESSAGE_BYTES).replace(fence, "'" * 7)
    return f"### {_cell(result.name)}\n\n{fence}text\n{message}\n{fence}\n"
