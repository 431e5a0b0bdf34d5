"""Defines the claim on collectives, which compares the recorded collectives with the documented ones."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from equivtest.base.collective import describe
from equivtest.cases.case import Case
from equivtest.oracle.collectives import expected_collectives, without_all_to_all
from equivtest.oracle.expected import Expected
from equivtest.ranks.reply import Answers
from equivtest.verdicts.verdict import Judgement, Mismatch


def judge_collectives(case: Case, expected: Expected, answers: Answers) -> Judgement | None:
    """Judges the kinds, counts and bytes of the collectives. Their order within a phase is not judged.

    Returns None if no rank could record a collective: see `equivtest.ranks.observe.recording.is_recordable`.
    """
    if all(answer.collectives is None for answer in answers.values()):
        return None
    wrong = []
    for rank, answer in answers.items():
        documented, recorded = expected_collectives(case, rank), answer.collectives
        if recorded is None:
            wrong.append(Mismatch("", rank, describe(documented), "not recorded on this rank"))
        elif Counter(recorded) not in (Counter(documented), Counter(without_all_to_all(documented))):
            wrong.append(Mismatch("", rank, describe(documented), describe(recorded)))
    if wrong:
        others = [str(mismatch.rank) for mismatch in wrong]
        wrong[0] = replace(wrong[0], extent=f"{len(wrong)} of {len(answers)} ranks: {', '.join(others)}")
    return Judgement("collectives" if wrong else "holds", tuple(wrong))
