"""Counts the planted defects that the shipped cases of a profile reject: `python -m studies.kills`.

Each defect takes the place of its subject in the property that judges it.  The profile's cases run in their order until
a claim fails.  `--random` takes random cases, as many as a profile had before there were covering arrays.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, zip_longest

from equivtest.base import limits
from equivtest.base.profiles import PROFILES, Profile, plan
from equivtest.cases.case import Case
from equivtest.cases.picks import builder_of
from equivtest.property import Property
from equivtest.pytest_plugin.suite import shipped
from equivtest.ranks.pool import Pool
from equivtest.search.chunks import chunk_cases, chunk_of
from equivtest.search.known import KnownFailures
from studies.detection import rejections
from tests.defects.defect import Defect, defects
from tests.engine.test_defects import known_of


@dataclass(frozen=True)
class Row:
    """How soon the cases of a profile rejected one defect.

    Attributes:
        visits: Number of cases until the first that a claim rejects, or 0.
        cases: Number of cases that the profile has for that property.
    """

    name: str
    visits: int
    cases: int
    seconds: float


def cases_of(prop: Property, subject: str, profile: Profile) -> list[Case]:
    """Returns the cases that a run of the profile has for `subject` under a property.  World sizes take turns."""
    prop = replace(prop, subject=subject)
    has_tables = builder_of(prop.cases) is not None
    parts = plan(profile, prop.among(limits.WORLD_SIZES), prop.weight, has_tables=has_tables)
    drawn = [chunk_cases(prop, chunk_of(part, limits.DTYPES)) for part in parts]
    return [case for case in chain.from_iterable(zip_longest(*drawn)) if case is not None]


def rejects(prop: Property, known: KnownFailures, case: Case, pool: Pool) -> bool:
    """True if some claim fails on the case, except by a known failure."""
    replies = pool.run(prop.subject, case, keep_if_all_raised=bool(case.refusal))
    return any(rejected for _, rejected in rejections(prop, known, case, replies))


def judged(defect: Defect, profile: Profile, pool: Pool) -> Row:
    begun_s, known = time.monotonic(), known_of(defect)
    props = (p for p in shipped().values() if p.subject == defect.replaces and p.refuses_only == is_refusal(defect))
    judged_as = [replace(prop, subject=defect.subject) for prop in props]
    visits = [(prop, case) for prop in judged_as for case in cases_of(prop, defect.replaces, profile)]
    visits = [(prop, case) for prop, case in visits if not known.forbids_run(prop.subject, case)]
    places = (place for place, (prop, case) in enumerate(visits, 1) if rejects(prop, known, case, pool))
    return Row(defect.name, next(places, 0), len(visits), time.monotonic() - begun_s)


def is_refusal(defect: Defect) -> bool:
    return defect.claim == "refuses"


def wanted(only: Sequence[str]) -> Iterator[Defect]:
    """Yields the defects whose subject contains one of `only`, except defects in users' programs."""
    for defect in defects():
        if defect.replaces != "module" and any(part in defect.replaces for part in only):
            yield defect


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m studies.kills")
    parser.add_argument("--only", default="", help="Defects of subjects whose name contains one of these, by comma.")
    parser.add_argument("--profile", default="gate", choices=("smoke", "gate", "conformance"))
    parser.add_argument("--random", action="store_true", help="Random cases instead of covering arrays.")
    options = parser.parse_args()
    profile = PROFILES[options.profile]
    profile = replace(profile, strength=0) if options.random else profile
    rows = []
    with Pool() as pool:
        for defect in wanted(options.only.split(",")):
            rows.append(row := judged(defect, profile, pool))
            found = f"case {row.visits}" if row.visits else "not rejected"
            print(f"{row.name:50} {found:14} of {row.cases:3} {row.seconds:6.1f} s", flush=True)
    print(f"{sum(row.visits > 0 for row in rows)} of {len(rows)} rejected")


if __name__ == "__main__":
    main()
