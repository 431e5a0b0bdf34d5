"""Claims on values: outputs, gradients and training, element by element."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from equivtest.cases.case import Case
from equivtest.cases.case_tensor import Role
from equivtest.layout import UNTOLD, is_partial
from equivtest.oracle.expected import Expected
from equivtest.ranks.reply import Answers
from equivtest.tensors import Placed
from equivtest.verdicts.elements import is_near, is_too_wide, judge_values, shape_mismatch
from equivtest.verdicts.lean import judge_lean
from equivtest.verdicts.structure import judge_layouts
from equivtest.verdicts.verdict import Judgement


def judge_outputs(case: Case, expected: Expected, answers: Answers) -> Judgement:
    judged = judge_tensors(case, expected, answers, names_of(case, expected, "output", "state", "kept"))
    outputs = names_of(case, expected, "output")
    if judged.kind not in ("holds", "inconclusive") or not outputs:
        return judged
    layouts = judge_layouts(expected, answers, outputs)
    return layouts if layouts.kind != "holds" else judged


def judge_gradients(case: Case, expected: Expected, answers: Answers) -> Judgement | None:
    names = names_of(case, expected, "gradient")
    return judge_tensors(case, expected, answers, names) if names else None


def judge_memory(case: Case, expected: Expected, answers: Answers) -> Judgement:
    return judge_tensors(case, expected, answers, names_of(case, expected, "memory"))


def judge_training(case: Case, expected: Expected, answers: Answers) -> Judgement:
    return judge_tensors(case, expected, answers, names_of(case, expected, "trained"))


def judge_tensors(case: Case, expected: Expected, answers: Answers, names: Iterable[str]) -> Judgement:
    """Judges each named tensor on every rank: its shape, then its values, then whether its errors lean to one side.

    If a tensor's bound is too wide, its values count as right only within `ExpectedTensor.resolution`. Values within
    the bound but not within the resolution leave the claim open. The claim fails all the same if another tensor is
    wrong.
    """
    shapes, values, agreeing, margin, is_open = [], [], [], 0.0, False
    margins: dict[str, float] = {}
    parts: dict[str, float | None] = {}
    for name in names:
        placed = _to_judge(name, expected, answers)
        mismatch = shape_mismatch(name, expected.tensors[name], placed, case.mesh_shape)
        if mismatch is not None:
            shapes.append(mismatch)
            continue
        present = {rank: tensor for rank, tensor in placed.items() if tensor is not None}
        if not present:  # and no answer is required
            agreeing.append(name)
            continue
        mismatch, ratio = judge_values(name, expected.tensors[name], present, case.mesh_shape)
        margin = max(margin, ratio)
        if expected.tensors[name].allowed is not None and not expected.tensors[name].is_inner:
            margins[name] = ratio
        if expected.tensors[name].is_part:
            parts[name] = ratio
        mismatch = mismatch or judge_lean(name, expected.tensors[name], present, case.mesh_shape)
        if mismatch is not None:
            values.append(mismatch)
        elif is_too_wide(expected.tensors[name]) and not is_near(expected.tensors[name], present, case.mesh_shape):
            is_open = is_open or not expected.tensors[name].is_inner
            parts |= {name: None} if name in parts else {}
        else:
            agreeing.append(name)
    kind = "shape" if shapes else "value" if values else "inconclusive" if is_open else "holds"
    factors = {name: expected.tensors[name].factor for name in agreeing if expected.tensors[name].factor != 1}
    return Judgement(
        kind, tuple(shapes or values), tuple(agreeing), margin=margin, margins=margins, parts=parts, factors=factors
    )


def _to_judge(name: str, expected: Expected, answers: Answers) -> dict[int, Placed | None]:
    """Maps each rank to its tensor. A plain tensor without a layout gets the layout that the oracle inferred.

    If a rank lacks the tensor, its entry is None, which is judged as a missing tensor. If the tensor may be None, the
    mapping has no entry for such a rank. The exception is a tensor with partial operands on other ranks: no rank may
    lack such a tensor.
    """
    placed = {rank: answer.tensors.get(name) for rank, answer in answers.items()}
    placed = {
        rank: replace(each, layout=expected.tensors[name].layout)
        if each and each.layout == UNTOLD and each.indices is None
        else each
        for rank, each in placed.items()
    }
    present = {rank: tensor for rank, tensor in placed.items() if tensor is not None}
    may_be_none = expected.tensors[name].may_be_none and not any(is_partial(each.layout) for each in present.values())
    return {**present} if may_be_none else placed


def names_of(case: Case, expected: Expected, *roles: Role) -> list[str]:
    return [name for name in expected.tensors if case.tensors[name].role in roles]
