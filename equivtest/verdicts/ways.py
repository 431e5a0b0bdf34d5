"""What was computed in two ways: one beside the other, as the ranks hold them."""

from __future__ import annotations

from collections.abc import Mapping

from equivtest.cases.case import Case
from equivtest.oracle.expected import Expected, Twin
from equivtest.ranks.reply import Answers
from equivtest.tensors import Placed
from equivtest.verdicts.bits import bits_mismatch, no_excuse, where_zeros_were_added
from equivtest.verdicts.elements import judge_values, shape_mismatch
from equivtest.verdicts.verdict import Judgement, Mismatch

Margin = float
"""Largest error over its allowance."""


def judge_ways(case: Case, expected: Expected, answers: Answers) -> Judgement | None:
    """Nothing where nothing was computed twice.

    A tensor that is missing or of another shape than its contract's is another claim's business;
    one whose twin cannot be put together agrees with nothing.
    """
    wrong, agreeing = [], []
    margins: dict[str, float] = {}
    for name, twin in expected.twins.items():
        held = {rank: answer.tensors.get(name) for rank, answer in answers.items()}
        if shape_mismatch(name, expected.tensors[name], held, case.mesh_shape) is not None:
            continue
        present = {rank: placed for rank, placed in held.items() if placed is not None}
        mismatch, margin = _compare(name, twin, present, case.mesh_shape)
        if twin.right is not None and twin.right.allowed is not None:
            margins[f"{name} beside {twin.other}"] = margin
        if mismatch is not None:
            wrong.append(mismatch)
        else:
            agreeing.append(name)
    if not expected.twins:
        return None
    margin = max(margins.values(), default=0.0)
    return Judgement("ways" if wrong else "holds", tuple(wrong), tuple(agreeing), margin=margin, margins=margins)


def _compare(
    name: str, twin: Twin, held: Mapping[int, Placed], mesh_shape: tuple[int, ...]
) -> tuple[Mismatch | None, Margin]:
    if twin.right is None:
        return Mismatch(name, 0, expected=f"what {twin.other} is", actual=f"ranks hold no whole {twin.other}"), 0.0
    if twin.right.bits is None:
        return judge_values(name, twin.right, held, mesh_shape)
    excuse = where_zeros_were_added if twin.zeros_added else no_excuse
    return bits_mismatch(name, twin.right, held, mesh_shape, excuse), 0.0
