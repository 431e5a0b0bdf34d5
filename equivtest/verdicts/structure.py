"""Claims on what holds the values: layouts, replicas, and the harness's own tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from equivtest.kit.case import Case
from equivtest.kit.oracle.expected import Expected
from equivtest.layout import replicas
from equivtest.ranks.reply import Answers
from equivtest.tensors import Placed, as_bits, assemble_listed, places_of, same_bits
from equivtest.verdicts.bits import in_words
from equivtest.verdicts.elements import BY_ELEMENTS, unravel
from equivtest.verdicts.verdict import Judgement, Mismatch

Shape = tuple[int, ...]


def judge_layouts(expected: Expected, answers: Answers, names: Iterable[str]) -> Judgement:
    wrong, agreeing = [], []
    for name in names:
        right = expected.tensors[name].layout
        found = {rank: answer.tensors[name].layout for rank, answer in answers.items() if name in answer.tensors}
        others = [rank for rank, layout in found.items() if layout != right]
        if others:
            extent = f"{len(others)} of {len(answers)} ranks"
            wrong.append(
                Mismatch(
                    name,
                    others[0],
                    str(right),
                    str(found[others[0]]),
                    extent=extent,
                    global_shape=tuple(expected.tensors[name].value.shape),
                )
            )
        elif len(found) == len(answers):
            agreeing.append(name)
    return Judgement("layout" if wrong else "holds", tuple(wrong), tuple(agreeing))


def judge_parameter_layouts(case: Case, expected: Expected, answers: Answers) -> Judgement:
    return judge_layouts(expected, answers, _of_parameters(expected))


def _of_parameters(expected: Expected) -> list[str]:
    """All but activations and their gradients, which torch may keep under another layout."""
    return [name for name in expected.tensors if not {"input", "output"} & {*name.split(".")}]


def judge_replicas(case: Case, expected: Expected, answers: Answers) -> Judgement:
    wrong, agreeing = [], []
    for name in expected.tensors:
        held = {rank: answer.tensors[name] for rank, answer in answers.items() if name in answer.tensors}
        if any(placed.indices is not None for placed in held.values()):
            mismatch = _listed_mismatch(name, held, tuple(expected.tensors[name].value.shape), case.mesh_shape)
            wrong += [mismatch] if mismatch else []
            agreeing += [] if mismatch else [name]
            continue
        layouts = {placed.layout for placed in held.values()}
        if len(held) < len(answers) or len(layouts) != 1:
            continue  # missing tensors and layouts are other claims' business
        layout = layouts.pop()
        if len(layout.placements) != len(case.mesh_shape):
            continue  # so are layouts of another mesh
        pairs = [(group[0], rank) for group in replicas(layout, case.mesh_shape) for rank in group[1:]]
        differing = [pair for pair in pairs if not same_bits(held[pair[0]].local, held[pair[1]].local)]
        if differing:
            wrong.append(_replica_mismatch(name, held[differing[0][0]].local, held[differing[0][1]].local, differing))
        else:
            agreeing.append(name)
    return Judgement("replica" if wrong else "holds", tuple(wrong), tuple(agreeing))


def _replica_mismatch(name: str, left: torch.Tensor, right: torch.Tensor, differing: list[tuple[int, int]]) -> Mismatch:
    first, second = differing[0]
    extent = ", ".join(f"{a} and {b}" for a, b in differing)
    if left.shape != right.shape or left.dtype != right.dtype:
        return Mismatch(
            name,
            second,
            f"{tuple(left.shape)} {left.dtype} as on rank {first}",
            f"{tuple(right.shape)} {right.dtype}",
            extent=f"ranks {extent}",
        )
    flat = int((as_bits(left) != as_bits(right)).reshape(-1).int().argmax())
    return Mismatch(
        name,
        second,
        f"{in_words(left, flat)} as on rank {first}",
        in_words(right, flat),
        local_index=unravel(flat, tuple(left.shape)),
        extent=f"ranks {extent}",
    )


def _listed_mismatch(name: str, held: Mapping[int, Placed], shape: Shape, mesh_shape: Shape) -> Mismatch | None:
    """The first element that a rank holds with other bits than the first rank that holds it.

    Tensors of another shape or dtype are other claims' business.
    """
    if len({placed.local.dtype for placed in held.values()}) > 1:
        return None
    try:
        assembled, holders = assemble_listed(held, shape, mesh_shape)
    except ValueError:
        return None
    if not assembled.disagreeing:
        return None
    rank = assembled.disagreeing[0][1]
    places, local = places_of(held[rank], shape, mesh_shape, rank).reshape(-1), held[rank].local
    right = assembled.tensor.reshape(-1)[places]
    flat = int((as_bits(right) != as_bits(local.reshape(-1))).int().argmax())
    place = int(places[flat])
    return Mismatch(
        name,
        rank,
        f"{in_words(right, flat)} as on rank {int(holders.reshape(-1)[place])}",
        in_words(local, flat),
        local_index=unravel(flat, tuple(local.shape)),
        global_index=unravel(place, shape),
        global_shape=shape,
        layout=BY_ELEMENTS,
        extent=f"ranks {', '.join(f'{a} and {b}' for a, b in assembled.disagreeing)}",
    )


def judge_touched(case: Case, expected: Expected, answers: Answers) -> Judgement:
    wrong = []
    for rank, answer in answers.items():
        for change in answer.touched:
            name, _, what = change.partition(": ")
            wrong.append(Mismatch(name, rank, expected="as it was handed out", actual=what))
        for name, flag in answer.requires_grad.items():
            right = expected.tensors[name].requires_grad if name in expected.tensors else None
            if right is not None and flag != right:
                wrong.append(Mismatch(name, rank, expected=f"requires_grad {right}", actual=f"requires_grad {flag}"))
    return Judgement("touched" if wrong else "holds", tuple(wrong))
