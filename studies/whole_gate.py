"""Runs a gate of the operators' properties with each wrong operator planted in torch: `python -m studies.whole_gate`.

A run has the gate's drawn cases of both properties, then all enumerated calls, whatever operator is wrong.  It ends
with the first case that a claim rejects, except by a known failure.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import replace

import torch

from equivtest.base.profiles import PROFILES
from equivtest.cases.case import Case
from equivtest.property import Property
from equivtest.pytest_plugin.suite import shipped
from equivtest.ranks.pool import Pool
from tests.gate import cases_of, known_in, rejects
from tests.planted.subjects import BLIND, SEEN, WRONG

PROPERTIES = (
    "dtensor_operator_chains", "redistribute", "rowwise_embedding", "parallel_cross_entropy", "dtensor_cross_entropy",
    "dtensor_operators",
)  # fmt: skip
"""Properties of operators, and others whose subjects redistribute DTensors or call operators that a rule concerns."""


def visits() -> Iterator[tuple[Property, Case]]:
    """Yields each case that a gate has for the operators' properties, with its property."""
    for name in PROPERTIES:
        yield from ((shipped()[name], case) for case in cases_of(shipped()[name], PROFILES["gate"]))


def row(name: str, listed: list[tuple[Property, Case]]) -> str:
    wrong, begun_s = WRONG[name], time.monotonic()
    number, by = 0, "GREEN"
    with Pool() as pool:
        for prop, case in listed:
            number += 1
            planted = replace(prop, subject=f"tests.planted.subjects:{name}__{prop.subject}")
            if rejects(planted, known_in(prop.subject, planted.subject), case, pool):
                by = getattr(case, "operator", prop.subject)
                break
    seconds = time.monotonic() - begun_s
    return f"| {name} | {wrong.kind} | {wrong.near} | {by} | {number} of {len(listed)} | {seconds:.0f} |"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m studies.whole_gate")
    parser.add_argument("names", nargs="*", default=list(WRONG))
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    print("| rule | what is wrong | near | rejected by | visits | seconds |")
    print("|" + " --- |" * 6)
    listed, rows = list(visits()), dict[str, str]()
    for name in parser.parse_args().names:
        rows[name] = row(name, listed)
        print(rows[name], flush=True)
    print(f"\nRejected are {num_rejected(rows, SEEN)} that were known when the gate's cases were last changed,")
    print(f"and {num_rejected(rows, BLIND)} that were planted after this change.")


def num_rejected(rows: dict[str, str], names: Iterable[str]) -> str:
    """Returns, for example, '3 of 4', from a table with one row for each name."""
    of = [rows[name] for name in names if name in rows]
    return f"{sum('| GREEN |' not in each for each in of)} of {len(of)}"


if __name__ == "__main__":
    main()
