"""Writes the bundle of a run after its end."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from equivtest.bundle import contents
from equivtest.bundle.bag import write_bag
from equivtest.bundle.contents import KnownList
from equivtest.report.results import Results
from equivtest.report.tally import Tally


def write_bundle(path: Path, environment: Mapping[str, Any], payload: Mapping[str, bytes]) -> str:
    """Writes the bundle's file and returns its digest.  Raises BrokenSetup if the file cannot be written."""
    info = {
        "Bag-Software-Agent": f"equivtest {environment['equivtest']}",
        "Bagging-Date": environment["started"][:10],
        "External-Description": f"{environment['profile']} on {environment['backend']}, {environment['device']}",
    }
    return write_bag(path, payload, info)


def payload_of(
    environment: Mapping[str, Any],
    results: Results,
    troubles: Sequence[str],
    holes_of: Callable[[Tally], Sequence[str]],
) -> dict[str, bytes]:
    """Returns the files of a run's bundle: path below data/ -> content.

    Args:
        troubles: Reasons, other than failing claims, why the run is red.
        holes_of: Returns a property's required cells without a conclusion.
    """
    sizes: dict[str, dict[str, int]] = {}
    for (name, label), records in results.searches.items():
        sizes.setdefault(name, {})[label] = len(records)
    written = contents.Results(
        schema=contents.SCHEMA,
        properties=tuple(
            contents.result_of(
                tally, sizes.get(tally.listed.name, {}), results.audits.get(tally.listed.id), holes_of(tally)
            )
            for tally in results.ordered()
        ),
        known=tuple(results.ordered_known()),
        troubles=tuple(troubles),
    )
    lists = [read_list(name) for name in msgspec.convert(environment, contents.Environment).own_lists]
    payload = {
        contents.ENVIRONMENT: contents.write_json(environment),
        contents.RESULTS: contents.write_json(written),
        contents.LISTS: contents.write_json(lists),
    }
    if environment.get("manifest"):
        manifest = tomllib.loads(Path(environment["manifest"]).read_text("utf-8"))
        payload[contents.MANIFEST] = contents.write_json(msgspec.to_builtins(manifest))
    return payload | {
        contents.search_file(name, label): contents.write_records(records)
        for (name, label), records in results.searches.items()
    }


def read_list(name: str) -> KnownList:
    """Reads a list of known failures that you passed, as a separate file or as the waivers of a manifest."""
    data = tomllib.loads(Path(name).read_text("utf-8"))
    return KnownList(name, msgspec.to_builtins(data.get("waiver" if "backend" in data else "known_failure", [])))
