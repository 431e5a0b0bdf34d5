"""Claims on layouts, replicas, and the tensors that the harness passes to the subject."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

import torch

from equivtest.cases.case import Case
from equivtest.layout import replicas
from equivtest.oracle.expected import Expected
from equivtest.ranks.reply import Answers
from equivtest.tensors import Placed, as_bits, assemble_listed, places_of, same_bits
from equivtest.verdicts.bits import in_words
from equivtest.verdicts.elements import BY_ELEMENTS, unravel
from equivtest.verdicts.verdict import Judgement, Mismatch

Shape = tuple[int, ...]

_Found = tuple[bool, Mismatch]
"""(True if values differ, False if only the bits of zeros or NaN do; the mismatch of two replicas)."""


def judge_layouts(expected: Expected, answers: Answers, names: Iterable[str]) -> Judgement:
    wrong, agreeing = [], []
    for name in names:
        right = expected.tensors[name].layout
        layouts = {rank: answer.tensors[name].layout for rank, answer in answers.items() if name in answer.tensors}
        others = [rank for rank, layout in layouts.items() if layout != right]
        if others:
            extent = f"{len(others)} of {len(answers)} ranks"
            wrong.append(
                Mismatch(
                    name,
                    others[0],
                    str(right),
                    str(layouts[others[0]]),
                    extent=extent,
                    global_shape=tuple(expected.tensors[name].value.shape),
                )
            )
        elif len(layouts) == len(answers):
            agreeing.append(name)
    return Judgement("layout" if wrong else "holds", tuple(wrong), tuple(agreeing))


def judge_parameter_layouts(case: Case, expected: Expected, answers: Answers) -> Judgement:
    return judge_layouts(expected, answers, _of_parameters(expected))


def _of_parameters(expected: Expected) -> list[str]:
    """Returns the names of all tensors except 'input', 'output' and the gradients of 'input' and 'output'.

    Torch may choose the layout of an input, an output and their gradients.
    """
    return [name for name in expected.tensors if not {"input", "output"} & {*name.split(".")}]


def judge_replicas(case: Case, expected: Expected, answers: Answers) -> Judgement:
    """Judges whether replicas have the same bits.

    Lists unequal values before values that are equal but have other bits, such as -0.0 and 0.0.
    """
    wrong: list[_Found] = []
    agreeing = []
    for name in expected.tensors:
        tensors = {rank: answer.tensors[name] for rank, answer in answers.items() if name in answer.tensors}
        if any(placed.indices is not None for placed in tensors.values()):
            found = _listed_mismatch(name, tensors, tuple(expected.tensors[name].value.shape), case.mesh_shape)
            wrong += [found] if found else []
            agreeing += [] if found else [name]
            continue
        layouts = {placed.layout for placed in tensors.values()}
        if len(tensors) < len(answers) or len(layouts) != 1:
            continue  # other claims judge missing tensors and layouts
        layout = layouts.pop()
        if len(layout.placements) != len(case.mesh_shape):
            continue  # and layouts of another mesh
        pairs = [(group[0], rank) for group in replicas(layout, case.mesh_shape) for rank in group[1:]]
        differing = [pair for pair in pairs if not same_bits(tensors[pair[0]].local, tensors[pair[1]].local)]
        if differing:
            extent = f"ranks {', '.join(f'{a} and {b}' for a, b in differing)}"
            compared = [_replica_mismatch(name, pair, *(tensors[rank].local for rank in pair)) for pair in differing]
            is_other_value, mismatch = min(compared, key=_bits_alone_last)
            wrong.append((is_other_value, replace(mismatch, extent=extent)))
        else:
            agreeing.append(name)
    ordered = [mismatch for _, mismatch in sorted(wrong, key=_bits_alone_last)]
    return Judgement("replica" if wrong else "holds", tuple(ordered), tuple(agreeing))


def _bits_alone_last(found: _Found) -> bool:
    return not found[0]


def _first_difference(left: torch.Tensor, right: torch.Tensor) -> tuple[bool, int]:
    """Returns (True, index) of the first unequal value, or (False, index) of the first unequal bits."""
    is_other = ((left != right) & ~(left.isnan() & right.isnan())).reshape(-1)
    if is_other.any():
        return True, int(is_other.int().argmax())
    return False, int((as_bits(left) != as_bits(right)).reshape(-1).int().argmax())


def _replica_mismatch(name: str, ranks: tuple[int, int], left: torch.Tensor, right: torch.Tensor) -> _Found:
    first, second = ranks
    if left.shape != right.shape or left.dtype != right.dtype:
        expected = f"{tuple(left.shape)} {left.dtype} as on rank {first}"
        return True, Mismatch(name, second, expected, f"{tuple(right.shape)} {right.dtype}")
    is_other_value, flat = _first_difference(left, right)
    return is_other_value, Mismatch(
        name,
        second,
        f"{in_words(left, flat)} as on rank {first}",
        in_words(right, flat),
        local_index=unravel(flat, tuple(left.shape)),
    )


def _listed_mismatch(name: str, held: Mapping[int, Placed], shape: Shape, mesh_shape: Shape) -> _Found | None:
    """Finds the first element that two ranks hold with different bits, for ranks that list their elements' indices.

    Returns (flag, mismatch). The flag is True if the two values differ, and False if only their bits differ. Returns
    None if all ranks agree, or if shapes or dtypes are wrong, because other claims judge shapes and dtypes.
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
    is_other_value, flat = _first_difference(right, local.reshape(-1))
    place = int(places[flat])
    return is_other_value, Mismatch(
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
            wrong.append(Mismatch(name, rank, expected="unchanged", actual=what))
        for name, flag in answer.requires_grad.items():
            right = expected.tensors[name].requires_grad if name in expected.tensors else None
            if right is not None and flag != right:
                wrong.append(Mismatch(name, rank, expected=f"requires_grad {right}", actual=f"requires_grad {flag}"))
    return Judgement("touched" if wrong else "holds", tuple(wrong))
