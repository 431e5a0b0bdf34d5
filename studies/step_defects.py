"""Shows which wrong steps of training a gate rejects, and how soon: python -m studies.step_defects [NAME ...].

Each wrong step takes the place of the step in a shipped property, and is judged by all cases that the gate has for this
property.  A step of DistributedDataParallel and a step with another norm bring their own module or parallelism.
"""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Sequence
from typing import Any

from equivtest.base.profiles import PROFILES
from equivtest.cases.case import Case
from equivtest.programs.examples.mixture import SIZES
from equivtest.property import resolved
from equivtest.pytest_plugin.suite import shipped
from equivtest.ranks.pool import Pool
from equivtest.verdicts.judging import judge
from tests.gate import cases_of
from tests.programs.wrong_norms import RIGHT_NORMS, WRONG_NORMS, Groups, Skips
from tests.programs.wrong_steps import WRONG

EXAMPLES = "equivtest.programs.examples."


@functools.cache
def gate_cases(name: str, pool: Pool) -> Sequence[Any]:
    return cases_of(resolved(shipped()[name], pool), PROFILES["gate"])


def cases_for(name: str, pool: Pool) -> list[Case]:
    """Returns the gate's cases of the property that the step belongs to, with this step."""
    norm: Any = {**RIGHT_NORMS, **WRONG_NORMS}.get(name)
    if norm is None:
        parallelize = "fully_sharded" if getattr(WRONG.get(name), "shards", False) else "data_parallel"
        given = {"step": f"tests.programs.wrong_steps:run_{name}", "parallelize": f"{EXAMPLES}plans:{parallelize}"}
        return [case.but(**given) for case in gate_cases("token_mean_step", pool)]
    kinds = {Groups: "norm_of_groups_by_root", Skips: "scaled_step"}
    prop = next((prop for kind, prop in kinds.items() if issubclass(norm, kind)), "norm_of_one_mesh_by_largest")
    given = {
        "build": f"{EXAMPLES}mixture:{norm.build}",
        "parallelize": f"{EXAMPLES}mixture_plan:{norm.parallelize}",
        "x_shape": (SIZES[norm.build],),
        "step": f"tests.programs.wrong_norms:run_{name}",
        "norm_type": norm.norm_type,
    }
    return [case.but(**given) for case in gate_cases(prop, pool)]


def row(name: str, pool: Pool) -> str:
    begun_s, cases = time.monotonic(), cases_for(name, pool)
    for number, case in enumerate(cases, 1):
        wrong = next((verdict for verdict in judge("module", case, pool) if verdict.failed), None)
        if wrong is not None:
            first = wrong.judgement.mismatches[0].tensor if wrong.judgement.mismatches else wrong.kind
            seconds = time.monotonic() - begun_s
            return f"| {name} | case {number} of {len(cases)} | {case.world_size} | {first} | {seconds:.1f} |"
    return f"| {name} | GREEN in {len(cases)} cases | | | {time.monotonic() - begun_s:.1f} |"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m studies.step_defects")
    parser.add_argument("names", nargs="*", default=[*WRONG, "Step", *WRONG_NORMS, *RIGHT_NORMS])
    print("| step | rejected by | ranks | first wrong tensor | seconds |\n" + "|" + " --- |" * 5)
    names = parser.parse_args().names
    with Pool() as pool:
        rows = {}
        for name in names:
            rows[name] = row(name, pool)
            print(rows[name], flush=True)
    print()
    for kind, group in (("right", {"Step", *RIGHT_NORMS}), ("wrong", {*WRONG, *WRONG_NORMS})):
        those = [name for name in names if name in group]
        print(f"{sum('| GREEN' not in rows[name] for name in those)} of {len(those)} {kind} steps are rejected")


if __name__ == "__main__":
    main()
