"""Which of two runs of the same model is wrong, and where neither is, how far they are apart."""

from __future__ import annotations

from typing import NamedTuple

from equivtest.captured.judge.inputs import COTANGENT
from equivtest.captured.judge.run import Judged, is_boundary_of_any
from equivtest.cases.case import require
from equivtest.oracle.held import put_together
from equivtest.programs.micro_batches import split_micro_batch
from equivtest.tensors import same_bits


def compare_runs(one: Judged, other: Judged) -> str:
    """Which of two runs is wrong, for the terminal.

    Raises:
        Misuse: they are of other inputs or parameters, so that they need not agree.
    """
    for name, tensor in one.given.items():
        require(
            split_micro_batch(name)[1].split(".")[0] == COTANGENT
            or (name in other.given and same_bits(tensor, other.given[name])),
            f"{one.run.folder} and {other.run.folder} were handed other values of {name}, so that they need not agree: "
            "capture both on the same batch, from the same parameters",
        )
    wrong = [each for each in (one, other) if each.failed]
    if wrong:
        names = " and ".join(str(each.run.folder) for each in wrong)
        return f"wrong: {names}" + f"; {one.run.folder if wrong == [other] else other.run.folder} holds" * (
            len(wrong) == 1
        )
    differing, furthest = _apart(one, other)
    open_ = dict.fromkeys(
        verdict.claim for each in (one, other) for verdict in each.verdicts if verdict.kind != "holds"
    )
    whether = f"neither is shown to be wrong, {', '.join(open_)} inconclusive" if open_ else "both hold"
    if not differing:
        return f"{whether}: all {furthest.num} outputs and gradients have the same bits in both"
    why = "" if open_ else ", as the order of summation allows"
    return (
        f"{whether}: {len(differing)} of {furthest.num} outputs and gradients have other bits{why}, {furthest.name} "
        f"most, by {furthest.share:.1g} of its root mean square"
    )


class _Furthest(NamedTuple):
    """What differs most of how many tensors, and by which share of its root mean square."""

    num: int
    name: str
    share: float


def _apart(one: Judged, other: Judged) -> tuple[list[str], _Furthest]:
    differing, furthest, num = [], _Furthest(0, "", 0.0), 0
    for name, right in one.expected.tensors.items():
        if is_boundary_of_any(name) or name.startswith("param.") or name not in other.expected.tensors:
            continue
        shape = tuple(right.value.shape)
        found = [put_together(each.held, name, shape, each.case.mesh_shape) for each in (one, other)]
        if found[0] is None or found[1] is None or other.expected.tensors[name].value.shape != shape:
            continue
        num += 1
        if not same_bits(found[0], found[1]):
            differing.append(name)
            root = float(found[0].double().square().mean().sqrt()) or 1.0
            share = float((found[0].double() - found[1].double()).abs().max()) / root
            furthest = max(furthest, _Furthest(0, name, share), key=lambda each: each.share)
    return differing, furthest._replace(num=num)
