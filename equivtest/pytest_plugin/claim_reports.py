"""Reports each claim to pytest as a separate test, although pytest has collected no item for it.

This module relies on these undocumented features of pytest 8 and 9:

- `TestReport` can be made by hand, and `pytest_runtest_logreport` takes reports of tests that were never collected: the
  terminal counts and prints them, JUnit XML writes them, and `Session` notes that a test failed.
- The terminal and JUnit XML each wait for the three reports, of setup, call and teardown, before a test is complete.
- A skipped report has (path, line, reason) in `longrepr`; `wasxfail` makes it an expected failure.
- JUnit XML writes the `user_properties` of the teardown's report as properties of the test.
- `Session.testscollected` is the number that the terminal's progress counts up to, and may be raised.
"""

from __future__ import annotations

import time
from typing import Any, Literal

import pytest

from equivtest.report.tally import ClaimResult

Outcome = Literal["passed", "failed", "skipped"]
OUTCOME_OF: dict[str, Outcome] = {"passed": "passed", "failed": "failed", "skipped": "skipped", "xfailed": "skipped"}


def report_claim(session: pytest.Session, path: str, name: str, result: ClaimResult, line: int | None = None) -> None:
    session.testscollected += 1
    longrepr: str | tuple[str, int, str] | None = result.text
    if result.outcome == "passed":
        longrepr = None
    if result.outcome == "skipped":
        longrepr = (path, 0, f"Skipped: {result.text}")
    extra: dict[str, Any] = {"wasxfail": result.text} if result.outcome == "xfailed" else {}
    now_s = time.time()
    for when in ("setup", "call", "teardown"):
        called = when == "call"
        report = pytest.TestReport(
            f"{path}::{name}::{result.claim}",
            (path, line, f"{name}: {result.claim}"),
            {},
            OUTCOME_OF[result.outcome] if called else "passed",
            longrepr if called else None,
            when,
            start=now_s,
            stop=now_s,
            user_properties=[("torch", result.torchs)] if result.torchs else [],
            **(extra if called else {}),
        )
        session.config.hook.pytest_runtest_logreport(report=report)
