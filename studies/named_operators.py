"""Counts how often a wrong operator on DTensors in a user's layer is blamed by name: python -m studies.named_operators.

Each row plants one wrong rule of `tests.planted.rules` in torch, on every rank, and runs one layer of
`tests.programs.sharded_layers`. [NAME ...] runs some rows.
"""

from __future__ import annotations

import sys

from equivtest.diagnose.blame import with_fault
from equivtest.ranks.pool import Pool
from equivtest.verdicts.judging import judge
from tests.planted.rules import WRONG
from tests.programs.sharded_layers import LAYERS, case_of, subject_of

FEWEST = 0.9
"""Fraction of the rejected layers whose operator must be named."""


def fault_of(name: str, pool: Pool) -> str:
    """Returns the cause that is found for the layer's failure, or '' if no claim rejects the layer."""
    failed = [verdict for verdict in judge(subject_of(name), case_of(name), pool) if verdict.failed]
    return with_fault(failed[0], pool).fault if failed else ""


def is_named(name: str, fault: str) -> bool:
    return fault.startswith(tuple(f"operator: {op} of " for op in WRONG[name].ops))


def main(names: list[str]) -> int:
    """Prints the table.  Returns 0 if at least FEWEST of the operators are named."""
    print("| wrong rule | named | fault |\n|---|---|---|")
    found = {}
    with Pool() as pool:
        for name in names or LAYERS:
            if fault := fault_of(name, pool):
                found[name] = is_named(name, fault)
            print(f"| {name} | {'yes' if found.get(name) else 'NO'} | {fault or 'no claim rejects it'} |", flush=True)
    print(f"\n{sum(found.values())} of {len(found)} operators are named")
    return int(sum(found.values()) < FEWEST * len(found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
