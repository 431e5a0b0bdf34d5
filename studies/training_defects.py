"""Counts the wrong rules of training in torch that a gate rejects: python -m studies.training_defects [NAME ...].

One line of torch is wrong, in the ranks and in this process.  All cases of a gate run for each shipped property whose
subject calls that part of torch, one case of each property in turn, until a claim fails.
"""

from __future__ import annotations

import sys
import time
import warnings
from dataclasses import replace
from functools import cache

import torch

from equivtest.base.profiles import PROFILES
from equivtest.cases.case import Case
from equivtest.property import Property, resolved
from equivtest.pytest_plugin.suite import shipped
from equivtest.ranks.pool import Pool
from tests.gate import cases_of, in_turns, known_in, rejects
from tests.planted.training import (
    BLIND,
    BLIND_AGAIN,
    BLIND_EIGHTH,
    BLIND_ELEVENTH,
    BLIND_FIFTH,
    BLIND_FOURTH,
    BLIND_NINTH,
    BLIND_SEVENTH,
    BLIND_SIXTH,
    BLIND_TENTH,
    BLIND_THIRD,
    FIRST,
    LATER,
    OF_OPTIONS,
    PROPERTIES,
    WRONG,
    planted,
)

GREEN = "GREEN"


@cache
def cases_for(name: str, pool: Pool) -> tuple[Property, list[Case]]:
    """Returns a shipped property and the cases that a gate runs for it."""
    prop = resolved(shipped()[name], pool)
    return prop, cases_of(prop, PROFILES["gate"])


def visits_of(name: str, pool: Pool) -> list[tuple[str, Property, Case]]:
    """Returns a gate's cases of each property about that part of torch.  The properties take turns."""
    listed = []
    for each in PROPERTIES[WRONG[name].part]:
        prop, cases = cases_for(each, pool)
        wrong = replace(prop, subject=f"tests.planted.training:{name}__{prop.subject}")
        listed.append([(each, wrong, case) for case in cases])
    return in_turns(listed)


def row(name: str, pool: Pool) -> str:
    begun_s, num_run, found = time.monotonic(), 0, GREEN
    visits = visits_of(name, pool)
    with planted(WRONG[name]):
        for each, prop, case in visits:
            num_run += 1
            if rejects(prop, known_in(shipped()[each].subject, prop.subject), case, pool):
                found = f"{each}, {case.world_size} ranks, {case.dtype}"
                break
    rule, took_s = WRONG[name], time.monotonic() - begun_s
    cells = (name, rule.kind, rule.near, found, f"{num_run} of {len(visits)}", f"{took_s:.0f}")
    return f"| {' | '.join(cells)} |"


def main(names: list[str]) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    batches = {
        "Rules that were known when cases were written": FIRST,
        "Rules that were planted afterwards": LATER,
        "Rules that were planted afterwards by an author who had read no case": BLIND,
        "Rules that were planted later by another author who had read no case": BLIND_AGAIN,
        "Rules that were planted by a third author who had read no case": BLIND_THIRD,
        "Rules that were planted by a fourth author who had read no case": BLIND_FOURTH,
        "Rules that were planted by a fifth author who had read no case": BLIND_FIFTH,
        "Rules that were planted by a sixth author who had read no case": BLIND_SIXTH,
        "Rules that were planted by a seventh author who had read no case": BLIND_SEVENTH,
        "Rules that were planted by an eighth author who had read no case": BLIND_EIGHTH,
        "Rules that were planted by a ninth author who had read no case": BLIND_NINTH,
        "Rules that were planted by a tenth author who had read no case": BLIND_TENTH,
        "Rules that were planted last by an eleventh author who had read no case": BLIND_ELEVENTH,
        "Rules of options that no shipped property used before": OF_OPTIONS,
    }
    with Pool() as pool:
        for title, batch in batches.items():
            if chosen := [name for name in names or WRONG if name in batch]:
                print_table(title, chosen, pool)


def print_table(title: str, names: list[str], pool: Pool) -> None:
    print(f"## {title}\n\n| rule | what is wrong | near | rejected by | visits | seconds |")
    print("|" + " --- |" * 6)
    rows = []
    for name in names:
        rows.append(row(name, pool))
        print(rows[-1], flush=True)
    num_red = sum(f"| {GREEN} |" not in each for each in rows)
    print(f"\n{num_red} of {len(rows)} are rejected\n")


if __name__ == "__main__":
    main(sys.argv[1:])
