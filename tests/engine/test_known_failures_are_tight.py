"""Known failures that keep a case from running: the cases that they cover really fail.

An entry broader than its failure hides cases that never run; its smallest case alone would not show that.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from functools import cache
from random import Random
from unittest.mock import Mock, patch

import pytest

from equivtest.cases.case import Case
from equivtest.cases.drawing import Drawing
from equivtest.errors import Misuse
from equivtest.programs.case import ModuleCase
from equivtest.property import Space
from equivtest.pytest_plugin.suite import shipped
from equivtest.ranks.pool import Pool
from equivtest.search.known import SHIPPED, KnownFailure, KnownFailures
from equivtest.verdicts.judging import judge_replies
from equivtest.verdicts.verdict import WHOLE_RUN

ENTRIES = [entry for entry in KnownFailures.load(SHIPPED).entries if entry.kind in WHOLE_RUN]
SPACE = Space((1, 2), ("float32",))
NUM_DRAWN = 500  # cases of each property
FEWER_DRAWN = {"dtensor_operators": 100, "dtensor_operator_chains": 20, "module": 20}
"""Subjects whose entries cover few drawn cases, however many are drawn: each entry is about one of many operators."""
NUM_SAMPLED = 4  # cases among those that an entry covers


@cache
def drawn_of(subject: str, program: str) -> tuple[Case, ...]:
    """Cases of the subject's properties, the same each time. If the subject runs programs, only cases of `program`.

    Drawn from the strategies' tables, but without Hypothesis, which takes a hundred times as long.
    """
    properties = [prop for prop in shipped().values() if prop.subject == subject and program in prop.statement]
    generator, data = Random(0), Mock()
    data.draw = lambda strategy: strategy.do_draw(data)
    with patch.object(Drawing, "pick", lambda _self, _name, table, *_: generator.choice(table)):
        num_drawn = FEWER_DRAWN.get(subject, NUM_DRAWN)
        drawn = list[Case]()
        for prop in properties:
            with suppress(Misuse):  # of a program that has no case in float32
                drawn += [prop.cases(SPACE).do_draw(data) for _ in range(num_drawn)]
    return tuple(case for case in drawn if not case.refusal)


def simplified(case: Case) -> Case:
    """The case with one draw of values and the world in order, for speed."""
    return replace(case, values=case.values[:1], repeats=False, records=False, members=())


def sample_of(entry: KnownFailure) -> list[Case]:
    """Cases that the entry covers, from the whole of what was drawn.  Its own case is a test of the run."""
    program = entry.case.parallelize.partition("(")[0] if isinstance(entry.case, ModuleCase) else ""
    covered = [case for case in drawn_of(entry.subject, program) if entry.covers(case)] or [entry.case]
    simple = [simplified(case) for case in covered]
    sample = [case for case in simple if entry.covers(case)] or [entry.case]
    return sample[:: -(-len(sample) // NUM_SAMPLED)]


def kinds_of(subject: str, case: Case, pool: Pool) -> set[str]:
    """Returns the kinds of a run's verdicts; ranks that all raised live on, as new ones take ten times as long."""
    replies = pool.run(subject, case, may_raise=True)
    return {verdict.kind for verdict in judge_replies(subject, case, replies)}


@pytest.mark.ranks
@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.id)
def test_known_failure_excludes_at_most_one_case_in_ten_that_would_hold(entry: KnownFailure, pool: Pool) -> None:
    sample = sample_of(entry)

    hold = [case for case in sample if entry.kind not in kinds_of(entry.subject, case, pool)]

    assert len(hold) <= len(sample) / 10, f"{len(hold)} of {len(sample)} do not fail as {entry.kind}, so {hold[0]}"
