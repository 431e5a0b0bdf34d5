"""Small runs, written by hand through the writer of the log."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from equivtest.report.handover import Coverage, CoveredRow, Handover, Listed, Record, Searched
from equivtest.report.log import LOG, SCHEMA, Entry, RunLog

ENVIRONMENT: dict[str, Any] = {
    "schema": SCHEMA,
    "equivtest_commit": "a" * 40,
    "torch": "2.13.0",
    "backend": "gloo",
    "profile": "gate",
    "world_sizes": [1, 2, 3, 4],
    "dtypes": ["float32", "float64"],
    "excused": [],
    "failed": 0,
    "concluded": 1,
    "started": "2026-11-25T10:00:00Z",
    "process": 17,
    "seconds": 12.0,
    "complete": True,
    "state": "ended",
}


def listed(name: str = "rowwise_linear", **changes: Any) -> Listed:
    fields: dict[str, Any] = {
        "path": "properties/test_a.py",
        "name": name,
        "subject": name,
        "statement": "It is the unsharded one.",
        "source": "style.py",
        "claims": ("equals_unsharded",),
        "planned": ("w2-0",),
        "line": 4,
    }
    return Listed(**fields | changes)


def record(number: int = 0, kind: str = "holds", **changes: Any) -> Record:
    """Returns the record of the case with that number."""
    fields: dict[str, Any] = {
        "schema": 1,
        "subject": "rowwise_linear",
        "case": {"schema": 1, "type": "LinearCase", "fields": {"world_size": 2, "in_features": number}},
        "draw": 0,
        "mode": "real",
        "seed": 0,
        "world_size": 2,
        "dtype": "float32",
        "shard_kind": "even",
        "refusal": "",
        "verdicts": {"equals_unsharded": kind},
        "margins": {"equals_unsharded": 0.25},
        "tensor_margins": {"output": 0.25},
        "known": {"equals_unsharded": "torch does so"} if kind == "known" else {},
        "busy_s": 0.5,
    }
    return Record(**fields | changes)


def searched(*records: Record, name: str = "rowwise_linear", pairs: Sequence[str] = (), **changes: Any) -> Handover:
    """Returns the data of a search that covers pairs of values, each written as 'axis=value other=value'."""
    rows = [tuple(tuple(value.split("=")) for value in pair.split()) for pair in pairs]
    covered = tuple(CoveredRow(state="judged", values=row) for row in rows)
    coverage = Coverage(array="", strength=2, rows=covered, infeasible=()) if rows else None
    fields: dict[str, Any] = {"listed": listed(name), "label": "w2-0", "start": "forkserver"}
    return Handover(searched=Searched(**fields | {"records": records, "coverage": coverage} | changes))


def write_run(folder: Path, *handovers: Handover, ended: bool = True, **environment: Any) -> Path:
    """Writes the log of a run into a folder, and returns the folder."""
    folder.mkdir(parents=True)
    log = RunLog(folder / LOG)
    begun = ENVIRONMENT | environment | {"complete": False, "state": "begun"}
    properties = {each.searched.listed.id: each.searched.listed for each in handovers if each.searched}
    log.add(Entry(environment=begun))
    for handover in handovers:
        log.add(Entry(handover=handover))
    log.add(Entry(properties=tuple(properties.values())))
    if ended:
        log.add(Entry(environment=ENVIRONMENT | environment))
    log.close()
    return folder
