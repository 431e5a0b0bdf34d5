"""Makes a small bundle: the smoke profile of `scale` on one and two ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec

from equivtest.base.profiles import AUDIT_LABEL, PROFILES
from equivtest.bundle.bag import write_bag
from equivtest.bundle.contents import Results, read_json, read_records, result_of, suite_digest, write_json
from equivtest.bundle.write import payload_of
from equivtest.property import Property
from equivtest.pytest_plugin.machine import cpu_name
from equivtest.pytest_plugin.suite import shipped
from equivtest.report import results as results_of_run
from equivtest.report.handover import Audited, Coverage, Failure, Record, listed_of
from equivtest.report.tally import Tally
from equivtest.search.chunks import Chunk, chunk_of
from equivtest.search.planned import parts_of

Payload = dict[str, bytes]
SIZES, DTYPES = (1, 2), ("float32", "bfloat16")
ENVIRONMENT = {
    "equivtest": "1", "equivtest_commit": "", "suite_digest": suite_digest(), "torch": metadata.version("torch"),
    "hypothesis": metadata.version("hypothesis"), "cpu": cpu_name(), "platform": "Linux", "backend": "gloo",
    "device": "cpu", "imports": [], "arithmetic": "torch on the CPU, gloo", "profile": "smoke", "seeds": "gate",
    "world_sizes": list(SIZES), "dtypes": list(DTYPES), "subjects": ["scale"], "allow_unsupported": [],
    "known_failures": "shipped", "audit": "on", "complete": True, "state": "ended",
    "started": "2026-01-01T00:00:00Z", "seconds": 1.5,
}  # fmt: skip
"""The environment of a run, as far as a verifier reads it."""

Searched = tuple[list[Record], Coverage | None, list[Failure]]


def bundle_of(search_of: Callable[[Property, Chunk], Searched], audited: Audited, **changes: Any) -> Payload:
    """Returns the files of a run's bundle.

    Args:
        search_of: Makes the verdicts of one search.
        changes: Of the environment.
    """
    prop = shipped()["scale"]
    parts = parts_of(prop, PROFILES["smoke"], SIZES)
    tally = Tally(
        listed_of(prop, path="", name="scale", planned=(*(part.label for part in parts), AUDIT_LABEL), has_audit=True)
    )
    searches = {}
    for part in parts:
        records, coverage, failures = search_of(prop, chunk_of(part, DTYPES, world_sizes=SIZES))
        tally.add(part.label, records, failures)
        if coverage is not None:
            tally.covered.add(coverage)
        searches["scale", part.label] = tuple(records)
    tally.done.add(AUDIT_LABEL)
    results = results_of_run.Results(tallies={tally.listed.id: tally}, audits={tally.listed.id: audited})
    results.searches = searches
    return payload_of(ENVIRONMENT | changes, results, (), lambda _: ())


def packed(path: Path, payload: Mapping[str, bytes]) -> Path:
    """Writes files as a bag with right checksums."""
    write_bag(path, payload, {"Bag-Software-Agent": "a test"})
    return path


def changed(payload: Payload, name: str, change: Callable[[Any], Any]) -> Payload:
    """Returns the files with one changed, in the form that equivtest writes; `change` gets the lines of a search."""
    if name.endswith(".jsonl"):
        lines = change([msgspec.json.decode(line) for line in payload[name].splitlines()])
        return payload | {name: b"".join(msgspec.json.encode(line) + b"\n" for line in lines)}
    return payload | {name: write_json(change(msgspec.json.decode(payload[name])))}


def recounted(payload: Payload) -> Payload:
    """Returns the files with results that follow from the verdicts, as a careful forger writes them."""
    prop = shipped()["scale"]
    results = read_json(payload["results.json"], Results)
    (result,) = results.properties
    labels = sorted(result.searches)
    tally = Tally(listed_of(prop, path="", name="scale", planned=(*labels, AUDIT_LABEL), has_audit=True))
    counts = {}
    for label in labels:
        records = read_records(payload.get(f"searches/scale/{label}.jsonl", b""))
        counts |= {label: len(records)} if records else {}
        tally.add(label, records, ())
    tally.done.add(AUDIT_LABEL)
    written = msgspec.structs.replace(result_of(tally, counts, result.audit, ()), covered=result.covered)
    return payload | {"results.json": write_json(msgspec.structs.replace(results, properties=(written,)))}
