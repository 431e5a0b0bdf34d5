"""Runs the cases that a shipped profile has for the property of a planted defect, until a claim fails."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain, zip_longest
from typing import TypeVar

from equivtest.base import limits
from equivtest.base.profiles import Profile
from equivtest.cases.case import Case
from equivtest.families.operators.case import OperatorCase
from equivtest.property import Property, resolved
from equivtest.pytest_plugin.suite import shipped
from equivtest.ranks.pool import Pool
from equivtest.search.chunks import chunk_cases, chunk_of
from equivtest.search.known import SHIPPED, KnownFailures
from equivtest.search.planned import parts_of
from equivtest.verdicts.judging import judge_replies
from tests.defects.defect import Defect

T = TypeVar("T")
KNOWN = KnownFailures.load(SHIPPED)


def property_of(defect: Defect) -> Property:
    """Returns the shipped property that must reject the defect."""
    build, parallelize = (getattr(defect.smallest, name, "").partition("(")[0] for name in ("build", "parallelize"))
    return next(
        p
        for p in shipped().values()
        if p.subject == defect.replaces
        and defect.claim in [c.name for c in p.claims]
        and build in ("", p.source)
        and p.statement.startswith(parallelize)
    )


def known_of(defect: Defect) -> KnownFailures:
    return known_in(defect.replaces, defect.subject)


def known_in(subject: str, replacement: str) -> KnownFailures:
    """Returns torch's known failures in a subject, which a wrong replacement of the subject has too."""
    return KnownFailures(tuple(replace(entry, subject=replacement) for entry in KNOWN.of(subject)))


def cases_of(prop: Property, profile: Profile, world_sizes: Sequence[int] = limits.WORLD_SIZES) -> list[Case]:
    """Returns the cases that a run of the profile runs for a resolved shipped property.  World sizes take turns.

    Args:
        world_sizes: Returns the run's cases of these sizes alone.
    """
    parts = parts_of(prop, profile, prop.among(limits.WORLD_SIZES))
    drawn = [chunk_cases(prop, chunk_of(part, limits.DTYPES)) for part in parts if part.world_size in world_sizes]
    return [case for case in in_turns(drawn) if not KNOWN.forbids_run(prop.subject, case)]


def in_turns(lists: Sequence[Sequence[T]]) -> list[T]:
    """Returns the first entry of each list, then the second of each, until all lists have ended."""
    return [entry for entry in chain.from_iterable(zip_longest(*lists)) if entry is not None]


def cases_for(
    defect: Defect, profile: Profile, pool: Pool, world_sizes: tuple[int, ...] = limits.WORLD_SIZES
) -> list[Case]:
    """Returns the cases of the profile that can show the defect.

    A defect of one operator shows in the cases of this operator alone, so cases of other operators are left out.
    """
    cases = _drawn(_resolved(property_of(defect), pool), profile, world_sizes)
    return [case for case in cases if _can_show(defect, case)]


_resolved, _drawn = functools.cache(resolved), functools.cache(cases_of)


def _can_show(defect: Defect, case: Case) -> bool:
    return type(defect.smallest) is not OperatorCase or (
        isinstance(case, OperatorCase) and case.operator == defect.smallest.operator
    )


def rejects(prop: Property, known: KnownFailures, case: Case, pool: Pool) -> bool:
    """True if some claim fails on the case, except by a known failure."""
    replies = pool.run(prop.subject, case)
    verdicts = judge_replies(prop.subject, case, replies, prop.claims)
    return any(each.failed and not known.match(each.subject, each.claim, each.case, each.kind) for each in verdicts)


def first_rejection(defect: Defect, cases: Sequence[Case], pool: Pool) -> int:
    """Returns the number of cases until the first that a claim rejects, or 0."""
    prop, known = replace(property_of(defect), subject=defect.subject), known_of(defect)
    return next((number for number, case in enumerate(cases, 1) if rejects(prop, known, case, pool)), 0)
