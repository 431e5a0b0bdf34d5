"""Lists which combinations of axis values the cases of a search have, and the result of each of these cases."""

from __future__ import annotations

from collections.abc import Callable

from equivtest.base.profiles import Profile, plan
from equivtest.cases.case import Case
from equivtest.cases.picks import builder_of
from equivtest.property import Property
from equivtest.report.handover import CaseState, Coverage, CoveredRow
from equivtest.search.chunks import Chunk, chunk_cases, chunk_of, covering_array_of
from equivtest.search.known import KnownFailures

StateOf = Callable[[Case], CaseState]
"""Returns what a case showed."""


def coverage_of(prop: Property, chunk: Chunk, state_of: StateOf) -> Coverage | None:
    """Returns the cases of the chunk's covering array with their states, or None if the chunk's cases are random."""
    array = covering_array_of(prop, chunk)
    if array is None:
        return None
    strength = min(map(len, array.covered), default=0)
    return Coverage(
        array="" if chunk.mixes_worlds else f"w{chunk.world_size}",
        strength=strength,
        rows=tuple(
            CoveredRow(state=state_of(row.case), values=tuple((name, str(value)) for name, value in row.values))
            for row in array.rows
            if row.case.world_size == chunk.world_size
        ),
        infeasible=tuple(
            tuple((name, str(value)) for name, value in each) for each in array.infeasible if len(each) == strength
        ),
    )


def planned_coverage(
    prop: Property, profile: Profile, world_sizes: tuple[int, ...], dtypes: tuple[str, ...], known: KnownFailures
) -> tuple[int, list[Coverage]]:
    """Returns a property's number of cases in a run of the profile, and the coverage of each search.  Runs nothing."""

    def state_of(case: Case) -> CaseState:
        is_known = any(known.match(prop.subject, claim.name, case) for claim in prop.claims)
        return "known" if is_known else "judged"

    num_cases, found = 0, []
    sizes = prop.among(world_sizes)
    for part in plan(profile, sizes, prop.weight, has_tables=builder_of(prop.cases) is not None):
        chunk = chunk_of(part, dtypes, world_sizes=sizes)
        num_cases += len(chunk_cases(prop, chunk))
        coverage = coverage_of(prop, chunk, state_of)
        found += [coverage] if coverage else []
    return num_cases, found
