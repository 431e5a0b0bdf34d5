"""Runs the cases that a shipped profile has for the property of a planted defect, until a claim fails."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain, zip_longest

from equivtest.base import limits
from equivtest.base.profiles import Profile
from equivtest.cases.case import Case
from equivtest.families.operators.case import OperatorCase
from equivtest.property import Property, resolved
from equivtest.pytest_plugin.suite import shipped
from equivtest.ranks.pool import Pool
from equivtest.ranks.reply import Reply
from equivtest.search.chunks import chunk_cases, chunk_of
from equivtest.search.known import SHIPPED, KnownFailures
from equivtest.search.planned import parts_of
from equivtest.verdicts.judging import judge_replies
from tests.defects.defect import Defect

KNOWN = KnownFailures.load(SHIPPED)


def property_of(defect: Defect) -> Property:
    """Returns the shipped property that must reject the defect."""
    build, parallelize = (getattr(defect.smallest, name, "") for name in ("build", "parallelize"))
    return next(
        p
        for p in shipped().values()
        if p.subject == defect.replaces
        and defect.claim in [c.name for c in p.claims]
        and build in ("", p.source)
        and p.statement.startswith(parallelize)
    )


def known_of(defect: Defect) -> KnownFailures:
    """Returns torch's known failures in the replaced subject, which the defect has too."""
    entries = KNOWN.of(defect.replaces)
    return KnownFailures(tuple(replace(entry, subject=defect.subject) for entry in entries))


def cases_of(defect: Defect, profile: Profile, pool: Pool) -> list[Case]:
    """Returns the cases of the profile that can show the defect.  World sizes take turns.

    A defect of one operator shows in the cases of this operator alone, so cases of other operators are left out.
    """
    prop, known = property_of(defect), known_of(defect)
    parts = parts_of(prop, profile, prop.among(limits.WORLD_SIZES))
    chunks = [chunk_of(part, limits.DTYPES) for part in parts]
    drawn = [chunk_cases(resolved(prop, pool, chunk.space), chunk) for chunk in chunks]
    cases = (case for case in chain.from_iterable(zip_longest(*drawn)) if case is not None)
    return [case for case in cases if _can_show(defect, case) and not known.forbids_run(defect.subject, case)]


def _can_show(defect: Defect, case: Case) -> bool:
    return type(defect.smallest) is not OperatorCase or (
        isinstance(case, OperatorCase) and case.operator == defect.smallest.operator
    )


def first_rejection(defect: Defect, cases: Sequence[Case], pool: Pool) -> int:
    """Returns the number of cases until the first that a claim rejects, or 0."""
    for number, case in enumerate(cases, 1):
        replies = pool.run(defect.subject, case, keep_if_all_raised=bool(case.refusal))
        if any(_rejections(defect, case, replies)):
            return number
    return 0


def _rejections(defect: Defect, case: Case, replies: list[Reply]) -> Iterator[bool]:
    known = known_of(defect)
    for verdict in judge_replies(defect.subject, case, replies, property_of(defect).claims):
        yield verdict.failed and not known.match(verdict.subject, verdict.claim, verdict.case, verdict.kind)
