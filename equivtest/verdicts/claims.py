"""The claims: a short fixed list, each a function of a case, what is expected and the answers.

(subject, claim) is the conformance key of every record; a name here is never changed without
a line in the changelog.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

import torch

from equivtest.cases.base import Case
from equivtest.collective import describe
from equivtest.layout import flat_axis, replicas
from equivtest.oracle.collectives import document, without_all_to_all
from equivtest.oracle.expected import Expected
from equivtest.ranks.reply import Answer
from equivtest.tensors import as_bits, same_bits
from equivtest.verdicts.bits import Excuse, bits_mismatch, in_words, no_excuse, repeat_mismatch, where_zeros_were_added
from equivtest.verdicts.elements import is_too_wide, judge_values, shape_mismatch, unravel
from equivtest.verdicts.lean import judge_lean
from equivtest.verdicts.verdict import Kind, Mismatch

Answers = Mapping[int, Answer]
"""rank -> its answer to one draw."""


@dataclass(frozen=True)
class Judgement:
    """What a claim makes of one draw; the fields are those of `Verdict`."""

    kind: Kind
    mismatches: tuple[Mismatch, ...] = ()
    agreeing: tuple[str, ...] = ()
    margin: float = 0.0
    margins: Mapping[str, float] = field(default_factory=dict)


def always(case: Case, draw: int) -> bool:
    """Of every draw of every case."""
    return True


@dataclass(frozen=True)
class Claim:
    """A claim: its name, what it means, how it is judged, and of which draws of which cases it speaks.

    Of others it gives no verdict at all.
    """

    name: str
    meaning: str
    judge: Callable[[Case, Expected, Answers], Judgement]
    applies: Callable[[Case, int], bool] = always


def _judge_tensors(case: Case, expected: Expected, answers: Answers, names: Iterable[str]) -> Judgement:
    """Shape first, then values, then what their errors have in common: of each named tensor on every rank.

    A tensor whose allowance is too wide agrees with nothing: the claim is open unless another
    element or tensor proves it wrong.
    """
    shapes, values, agreeing, margin, is_open = [], [], [], 0.0, False
    margins: dict[str, float] = {}
    for name in names:
        placed = {rank: answer.tensors.get(name) for rank, answer in answers.items()}
        mismatch = shape_mismatch(name, expected.tensors[name], placed, case.mesh_shape)
        if mismatch is not None:
            shapes.append(mismatch)
            continue
        present = {rank: tensor for rank, tensor in placed.items() if tensor is not None}
        mismatch, ratio = judge_values(name, expected.tensors[name], present, case.mesh_shape)
        margin = max(margin, ratio)
        if expected.tensors[name].allowed is not None:
            margins[name] = ratio
        mismatch = mismatch or judge_lean(name, expected.tensors[name], present, case.mesh_shape)
        if mismatch is not None:
            values.append(mismatch)
        elif is_too_wide(expected.tensors[name]):
            is_open = True
        else:
            agreeing.append(name)
    kind: Kind = "shape" if shapes else "value" if values else "inconclusive" if is_open else "holds"
    return Judgement(kind, tuple(shapes or values), tuple(agreeing), margin, margins)


def _judge_layouts(expected: Expected, answers: Answers, names: Iterable[str]) -> Judgement:
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


def _outputs(expected: Expected) -> list[str]:
    return [name for name in expected.tensors if not name.startswith(("grad.", "step"))]


def _gradients(expected: Expected) -> list[str]:
    return [name for name in expected.tensors if name.startswith("grad.")]


def _later(expected: Expected) -> list[str]:
    """What the updates leave, and all that the steps after the first compute."""
    return [name for name in expected.tensors if name.startswith("step")]


def _of_parameters(expected: Expected) -> list[str]:
    """All but activations and their gradients, which torch may keep under another layout."""
    return [name for name in expected.tensors if name.rpartition(".")[2] not in ("input", "output")]


def _judge_outputs(case: Case, expected: Expected, answers: Answers) -> Judgement:
    judged = _judge_tensors(case, expected, answers, _outputs(expected))
    if judged.kind not in ("holds", "inconclusive") or "output" not in expected.tensors:
        return judged
    layouts = _judge_layouts(expected, answers, ["output"])
    return layouts if layouts.kind != "holds" else judged


def _judge_gradients(case: Case, expected: Expected, answers: Answers) -> Judgement:
    return _judge_tensors(case, expected, answers, _gradients(expected))


def _judge_parameter_layouts(case: Case, expected: Expected, answers: Answers) -> Judgement:
    return _judge_layouts(expected, answers, _of_parameters(expected))


def _judge_training(case: Case, expected: Expected, answers: Answers) -> Judgement:
    return _judge_tensors(case, expected, answers, _later(expected))


def _judge_replicas(case: Case, expected: Expected, answers: Answers) -> Judgement:
    wrong, agreeing = [], []
    for name in expected.tensors:
        held = {rank: answer.tensors[name] for rank, answer in answers.items() if name in answer.tensors}
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


def _judge_touched(case: Case, expected: Expected, answers: Answers) -> Judgement:
    wrong = []
    for rank, answer in answers.items():
        for change in answer.touched:
            name, _, what = change.partition(": ")
            wrong.append(Mismatch(name, rank, expected="as it was handed out", actual=what))
        for name, flag in answer.requires_grad.items():
            right = expected.tensors[name].requires_grad
            if right is not None and flag != right:
                wrong.append(Mismatch(name, rank, expected=f"requires_grad {right}", actual=f"requires_grad {flag}"))
    return Judgement("touched" if wrong else "holds", tuple(wrong))


def _judge_bits(case: Case, expected: Expected, answers: Answers, excuse: Excuse = no_excuse) -> Judgement:
    """Inconclusive where no tensor has right bits to be compared with.

    What a rank holds as its own part of a flat partition took part in no sum, and has no excuse.
    """
    wrong, agreeing = [], []
    for name, tensor in expected.tensors.items():
        if tensor.bits is None:
            continue
        held = {rank: answer.tensors[name] for rank, answer in answers.items() if name in answer.tensors}
        excused = no_excuse if flat_axis(tensor.layout) is not None else excuse
        mismatch = bits_mismatch(name, tensor, held, case.mesh_shape, excused)
        if mismatch is not None:
            wrong.append(mismatch)
        else:
            agreeing.append(name)
    if not wrong and not agreeing:
        return Judgement("inconclusive")
    return Judgement("bits" if wrong else "holds", tuple(wrong), tuple(agreeing))


def _judge_bits_but_for_zeros(case: Case, expected: Expected, answers: Answers) -> Judgement:
    return _judge_bits(case, expected, answers, where_zeros_were_added)


def _judge_repeats(case: Case, expected: Expected, answers: Answers) -> Judgement:
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


def _judge_collectives(case: Case, expected: Expected, answers: Answers) -> Judgement:
    """Kinds, counts and bytes; the order within a phase is the backend's business."""
    wrong = []
    for rank, answer in answers.items():
        documented, found = document(case, rank), answer.collectives or ()
        if Counter(found) not in (Counter(documented), Counter(without_all_to_all(documented))):
            wrong.append(Mismatch("", rank, describe(documented), describe(found)))
    if wrong:
        others = [str(mismatch.rank) for mismatch in wrong]
        wrong[0] = replace(wrong[0], extent=f"{len(wrong)} of {len(answers)} ranks: {', '.join(others)}")
    return Judgement("collectives" if wrong else "holds", tuple(wrong))


def _judge_refusal(case: Case, expected: Expected, answers: Answers) -> Judgement:
    raise AssertionError("a refusal is judged from the replies' outcomes: see compare")


equals_unsharded = Claim(
    "equals_unsharded", "output and parameters equal the oracle's, the output under its layout", _judge_outputs
)
gradients_equal_unsharded = Claim(
    "gradients_equal_unsharded", "gradients of inputs and parameters equal the oracle's", _judge_gradients
)
agrees_on_all_ranks = Claim("agrees_on_all_ranks", "what is replicated is bitwise equal on every rank", _judge_replicas)
keeps_layout_of_parameter = Claim(
    "keeps_layout_of_parameter",
    "parameters and gradients carry the layout of their parameter",
    _judge_parameter_layouts,
)
trains_like_unsharded = Claim(
    "trains_like_unsharded",
    "each update, and each step after the first, equals the oracle's from the state that the step before it left",
    _judge_training,
    lambda case, draw: case.trains,
)
does_not_touch_its_inputs = Claim(
    "does_not_touch_its_inputs", "inputs, parameters and requires_grad flags are as before", _judge_touched
)
uses_only_collectives = Claim(
    "uses_only_collectives",
    "kinds, counts and bytes of collectives are the documented ones on every rank; judged where they are recorded",
    _judge_collectives,
    lambda case, draw: case.records,
)
refuses = Claim(
    "refuses", "a case outside the contract raises the same kind of error on every rank, none hangs", _judge_refusal
)
is_exact_without_reduction = Claim(
    "is_exact_without_reduction",
    "where no sum crosses ranks, every bit is that of the unsharded run: signs of zero, NaN and payloads too",
    _judge_bits,
)
is_exact_but_for_added_zeros = Claim(
    "is_exact_but_for_added_zeros",
    "every bit is that of the unsharded run, but that -0.0 may be +0.0 and a NaN any other: zeros were added",
    _judge_bits_but_for_zeros,
)
is_the_identity_for_one_rank = Claim(
    "is_the_identity_for_one_rank",
    "on one rank every bit is that of no parallelism at all, whatever the collective",
    _judge_bits,
    lambda case, draw: case.world_size == 1,
)
repeats_itself = Claim(
    "repeats_itself",
    "draw 0, run once more in the same processes after all other draws, gives the same bits; that calls with other "
    "arguments before it did no harm to those draws is judged by the claims about values",
    _judge_repeats,
    lambda case, draw: case.repeats and draw == 0,
)

CLAIMS = {
    claim.name: claim
    for claim in (
        equals_unsharded, gradients_equal_unsharded, agrees_on_all_ranks, keeps_layout_of_parameter,
        trains_like_unsharded, does_not_touch_its_inputs, is_exact_without_reduction, is_exact_but_for_added_zeros,
        is_the_identity_for_one_rank, repeats_itself, uses_only_collectives, refuses,
    )
}  # fmt: skip
"""Every claim by name."""
