"""Claims that compare bits: with the oracle's, and with those of the same draw run again."""

from __future__ import annotations

from equivtest.cases.base import Case
from equivtest.layout import flat_axis
from equivtest.oracle.expected import Expected
from equivtest.verdicts.bits import (
    Excuse,
    bits_mismatch,
    no_excuse,
    repeat_mismatch,
    where_both_are_zero,
    where_zeros_were_added,
)
from equivtest.verdicts.judgement import Answers, Judgement


def judge_bits(case: Case, expected: Expected, answers: Answers, excuse: Excuse = no_excuse) -> Judgement | None:
    """Nothing where no tensor has right bits to be compared with.

    What a rank holds as its own part of a flat partition took part in no sum, and has no excuse.
    """
    wrong, agreeing = [], []
    for name, tensor in expected.tensors.items():
        if tensor.bits is None:
            continue
        held = {rank: answer.tensors[name] for rank, answer in answers.items() if name in answer.tensors}
        excused = no_excuse if flat_axis(tensor.layout) is not None else excuse
        excused = where_both_are_zero if tensor.is_sum else excused
        mismatch = bits_mismatch(name, tensor, held, case.mesh_shape, excused)
        if mismatch is not None:
            wrong.append(mismatch)
        else:
            agreeing.append(name)
    if not wrong and not agreeing:
        return None
    return Judgement("bits" if wrong else "holds", tuple(wrong), tuple(agreeing))


def judge_bits_but_for_zeros(case: Case, expected: Expected, answers: Answers) -> Judgement | None:
    return judge_bits(case, expected, answers, where_zeros_were_added)


def judge_repeats(case: Case, expected: Expected, answers: Answers) -> Judgement:
    wrong, agreeing = [], []
    for name in expected.tensors:
        first = {rank: answer.tensors[name] for rank, answer in answers.items() if name in answer.tensors}
        again = {rank: answer.again.get(name) for rank, answer in answers.items()}
        mismatch = repeat_mismatch(name, first, again)
        if mismatch is not None:
            wrong.append(mismatch)
        elif first:
            agreeing.append(name)
    return Judgement("repeat" if wrong else "holds", tuple(wrong), tuple(agreeing))
