"""Converts a report to CTRF, the Common Test Report Format, with one test for each claim of each property.

Source: schema/ctrf.schema.json of ctrf-io/ctrf, version 0.0.0 of its specification.
"""

from __future__ import annotations

import json
from collections import Counter
from datetime import datetime
from typing import Any

from equivtest.report.formats.results import Result, results_in
from equivtest.report.log import Run

STATUS = {"passed": "passed", "failed": "failed", "skipped": "skipped", "xfailed": "other"}


def as_ctrf(run: Run) -> str:
    environment = run.environment
    tests = [_test(result) for result in results_in(run)]
    counts = Counter(test["status"] for test in tests)
    start_s = datetime.fromisoformat(environment["started"]).timestamp()
    summary = {name: counts[name] for name in ("passed", "failed", "skipped", "pending", "other")}
    times = {"start": round(start_s * 1000), "stop": round((start_s + environment["seconds"]) * 1000)}
    data = {
        "reportFormat": "CTRF",
        "specVersion": "0.0.0",
        "generatedBy": "equivtest",
        "results": {
            "tool": {"name": "equivtest", "version": str(environment.get("equivtest", ""))},
            "summary": {"tests": len(tests), **summary, **times},
            "tests": tests,
            "environment": {"extra": dict(environment)},
        },
    }
    return json.dumps(data, indent=2) + "\n"


def _test(result: Result) -> dict[str, Any]:
    """Returns one test in the form of CTRF. Its duration is 0, because all claims are judged from the same runs."""
    test: dict[str, Any] = {
        "name": result.name,
        "status": STATUS[result.outcome],
        "rawStatus": result.outcome,
        "duration": 0,
        "suite": [result.listed.path, result.listed.name],
        "filePath": result.listed.path,
        "labels": {"subject": result.listed.subject, "claim": result.claim},
    }
    if result.line is not None:
        test["line"] = result.line
    if result.text:
        test |= {"message": result.text.partition("\n")[0], "trace": result.text}
    return test
