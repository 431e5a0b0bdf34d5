"""Claims that compare bits with the oracle's bits, and with a second run of the same draw."""

from __future__ import annotations

from collections.abc import Mapping

from equivtest.cases.case import Case
from equivtest.layout import flat_axis
from equivtest.oracle.expected import Expected, ExpectedTensor
from equivtest.ranks.reply import Answers
from equivtest.tensors import Placed, same_bits
from equivtest.verdicts.bits import (
    Excuse,
    bits_mismatch,
    form_mismatch,
    no_excuse,
    repeat_mismatch,
    where_both_are_zero,
    where_zeros_were_added,
)
from equivtest.verdicts.elements import is_too_wide, judge_values, shape_mismatch
from equivtest.verdicts.verdict import Judgement, Mismatch


def judge_bits(case: Case, expected: Expected, answers: Answers, excuse: Excuse = no_excuse) -> Judgement | None:
    """Compares each tensor bit by bit with the oracle's bits.

    Returns None if the oracle knows the bits of no tensor.

    If a tensor is a sum, a zero may have either sign, whatever `excuse` says.  Under a `Flat` layout `excuse` does not
    apply, because the elements took part in no sum.

    Args:
        excuse: Function (actual, expected) -> mask of the elements whose bits may differ.
    """
    wrong, agreeing = [], []
    for name, tensor in expected.tensors.items():
        if tensor.bits is None:
            continue
        tensors = {rank: answer.tensors[name] for rank, answer in answers.items() if name in answer.tensors}
        excused = no_excuse if flat_axis(tensor.layout) is not None else excuse
        excused = where_both_are_zero if tensor.is_sum else excused
        mismatch = bits_mismatch(name, tensor, tensors, case.mesh_shape, excused)
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
    """Requires that the second run of a draw gave the same bits as the first.

    If the backend declares that its order of summation varies, a rounded value of the second run may differ within its
    bound.
    """
    wrong, agreeing, is_open, margin = [], [], False, 0.0
    for name in expected.tensors:
        first = {rank: answer.tensors[name] for rank, answer in answers.items() if name in answer.tensors}
        again = {rank: placed for rank, answer in answers.items() if (placed := answer.again.get(name)) is not None}
        mismatch = form_mismatch(name, first, again) or repeat_mismatch(name, first, again)
        right = _in_other_order(expected, name)
        if mismatch is not None and mismatch.local_index is not None and right is not None:
            mismatch, ratio = _judge_again(name, right, again, case)
            margin, is_open = max(margin, ratio), is_open or is_too_wide(right)
        if mismatch is not None:
            wrong.append(mismatch)
        elif first:
            agreeing.append(name)
    kind = "repeat" if wrong else "inconclusive" if is_open else "holds"
    return Judgement(kind, tuple(wrong), tuple(agreeing), margin=margin)


def _judge_again(
    name: str, right: ExpectedTensor, again: Mapping[int, Placed], case: Case
) -> tuple[Mismatch | None, float]:
    misshapen = shape_mismatch(name, right, again, case.mesh_shape)
    return (misshapen, 0.0) if misshapen else judge_values(name, right, again, case.mesh_shape)


def _in_other_order(expected: Expected, name: str) -> ExpectedTensor | None:
    """Returns the right values of the second run, or None if the bits of both runs must be equal."""
    if expected.again is None or expected.drops:
        return None
    one, two = expected.tensors[name], expected.again.tensors[name]
    is_exact = one.allowed is None and two.allowed is None and same_bits(one.value, two.value)
    return None if is_exact else two
