"""Converts a report to the inputs of PyTorch's Cross-Repository CI Relay, as outputs of a GitHub step.

Sources, both of pytorch/test-infra in September 2026: `.github/actions/cross-repo-ci-relay-callback/action.yml` for the
inputs and the limits of failed tests (RFC-0054); `triage_verdict.py` of the relay for the verdict.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from equivtest.report.formats.results import Result, cut_bytes, results_in
from equivtest.report.handover import Failure
from equivtest.report.log import Run

MAX_FAILED = 1000
MAX_MESSAGE_BYTES, MAX_STACKTRACE_BYTES = 1024, 4096
MAX_VERDICT_BYTES = 16 * 1024
MAX_EVIDENCE = 10
MAX_TEXT = 1000  # characters of the summary and of an excerpt
MAX_SHORT = 200  # characters of all other texts

CAUSES = {"collective": ("backend", "high"), "operator": ("upstream", "medium")}
"""Kind of wrong call -> (category, confidence).  For a kernel, `_blame_one` decides by the device."""


def as_outputs(run: Run) -> str:
    """Returns the lines for $GITHUB_OUTPUT, each as NAME=JSON."""
    failed = results_in(run, ("failed",))
    counts = Counter(result.outcome for result in results_in(run))
    outputs: dict[str, Any] = {
        "test-results": {
            "passed": counts["passed"], "failed": counts["failed"], "skipped": counts["skipped"] + counts["xfailed"],
        },
        "failed-tests-detail": [_detail(result) for result in failed[:MAX_FAILED]],
    }  # fmt: skip
    if failed:
        outputs["triage-verdict"] = verdict_on(run, failed)
    return "".join(f"{name}={json.dumps(value)}\n" for name, value in outputs.items())


def _detail(result: Result) -> dict[str, str]:
    return {
        "name": result.claim,
        "classname": f"{result.listed.path}::{result.listed.name}",
        "message": cut_bytes(result.text.partition("\n")[0], MAX_MESSAGE_BYTES),
        "stacktrace": cut_bytes(result.text, MAX_STACKTRACE_BYTES),
    }


def verdict_on(run: Run, failed: Sequence[Result]) -> dict[str, Any]:
    """Returns the relay's triage verdict: the cause of the failing claims, the confidence, and the evidence."""
    failures = [failure for result in failed for failure in result.failures]
    category, confidence = _blame(run, failures)
    names = ", ".join(dict.fromkeys(result.name for result in failed))
    verdict: dict[str, Any] = {
        "schema_version": 1,
        "category": category,
        "confidence": confidence,
        "summary": f"claims that fail: {names}"[:MAX_TEXT],
        "evidence": [_evidence(result) for result in failed[:MAX_EVIDENCE]],
        "analyzer": {"name": "equivtest", "version": str(run.environment.get("equivtest", "unknown"))[:MAX_SHORT]},
        "analyzed_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    if failures:
        verdict["reproduced_on_retry"] = not any(failure.history for failure in failures)
    while len(json.dumps(verdict).encode()) > MAX_VERDICT_BYTES:
        verdict["evidence"].pop()
    return verdict


def _evidence(result: Result) -> dict[str, str]:
    job = os.environ.get("GITHUB_JOB") or "equivtest"
    return {"job": job[:MAX_SHORT], "test": result.name[:MAX_SHORT], "excerpt": result.text[:MAX_TEXT]}


def _blame(run: Run, failures: Sequence[Failure]) -> tuple[str, str]:
    """Returns (category, confidence) of the cause of a run's failures, such as ('backend', 'high').

    A failure that did not repeat in new ranks is a 'flake', because it depends on earlier cases.
    """
    if run.results.faults:
        return "backend", "high"
    found = {_blame_one(run, failure) for failure in failures}
    if len(found) == 1:
        return found.pop()
    categories = {category for category, _ in found}
    return (categories.pop(), "low") if len(categories) == 1 else ("unknown", "low")


def _blame_one(run: Run, failure: Failure) -> tuple[str, str]:
    if failure.history:
        return "flake", "low"
    cause = failure.fault.partition(":")[0]
    if cause == "kernel":
        return ("upstream" if run.environment.get("device") == "cpu" else "backend"), "medium"
    return CAUSES.get(cause, ("unknown", "low"))
