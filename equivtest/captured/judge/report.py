"""Writes the report on captured runs: the verdicts, the coverage, and which of two runs is wrong."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from equivtest.captured.format.folder import CapturedRun
from equivtest.captured.judge.evidence import COTANGENT, Evidence
from equivtest.cases.case import require
from equivtest.oracle.held import put_together
from equivtest.programs.boundaries import CHOSEN, is_boundary
from equivtest.programs.micro_batches import split_micro_batch
from equivtest.report.parts import PartTree
from equivtest.tensors import same_bits
from equivtest.verdicts.claims import equals_unsharded, gradients_equal_unsharded, trains_like_unsharded
from equivtest.verdicts.elements import is_too_wide
from equivtest.verdicts.message import describe_failure, few, on_factors
from equivtest.verdicts.verdict import Verdict

VALUES = tuple(claim.name for claim in (equals_unsharded, gradients_equal_unsharded, trains_like_unsharded))


@dataclass(frozen=True)
class Judged:
    run: CapturedRun
    evidence: Evidence
    verdicts: Sequence[Verdict]

    @property
    def failed(self) -> list[Verdict]:
        return [verdict for verdict in self.verdicts if verdict.failed]

    def parts(self) -> PartTree:
        judgements = [verdict.judgement for verdict in self.verdicts]
        parts = {name: margin for judgement in judgements for name, margin in judgement.parts.items()}
        wrong = (mismatch.tensor for judgement in judgements for mismatch in judgement.mismatches)
        tree = PartTree()
        tree.add(parts, next((name for name in wrong if name in parts), ""))
        return tree

    def undecided(self) -> list[str]:
        """Returns the tensors without a conclusion: their bound is too wide, and their values do not agree closely."""
        on_values = [verdict.judgement for verdict in self.verdicts if verdict.claim in VALUES]
        agreeing = {name for judgement in on_values for name in judgement.agreeing}
        tensors = self.evidence.expected.tensors
        return [name for name, expected in tensors.items() if is_too_wide(expected) and name not in agreeing]

    def coverage(self) -> str:
        if self.run.manifest.optimizer:
            return self._coverage_of_update()
        expected = set(filter(_is_boundary_of_any, self.evidence.expected.tensors))
        observed = {name for tensors in self.evidence.observed.values() for name in filter(_is_judged, tensors)}
        captured = {name for rank in self.run.ranks.values() for name in filter(_is_judged, rank)}
        num_wide = sum(map(_is_boundary_of_any, self.undecided()))
        texts = [f"{len(expected) - num_wide} of {len(captured)} boundaries judged"]
        texts += [f"{num_wide} with too wide a bound"] * bool(num_wide)
        texts += [f"{len(observed - expected)} without a known layout"] * bool(observed - expected)
        texts += [f"{len(captured - observed)} that the reference does not have"] * bool(captured - observed)
        return ", ".join(texts)

    def _coverage_of_update(self) -> str:
        """Describes how many tensors of an update were judged, and which parameters the optimizer does not update.

        The text names parameters with a gradient that are in no group of the optimizer.  These parameters must keep
        their values.
        """
        manifest, num = self.run.manifest, len(self.evidence.expected.tensors)
        grouped = {name for group in manifest.groups for name in group.parameters}
        left_out = [
            name for name in manifest.parameters if f"grad.{name}" in self.evidence.inputs and name not in grouped
        ]
        text = f"{num - len(self.undecided())} of {num} tensors judged after the update of {manifest.optimizer}"
        return text + f"; in no group of the optimizer, although they have a gradient: {few(left_out)}" * bool(left_out)


def _is_judged(name: str) -> bool:
    """True if a boundary gets a verdict.  The indices of a topk get no verdict."""
    return _is_boundary_of_any(name) and not name.endswith(CHOSEN)


def _is_boundary_of_any(name: str) -> bool:
    return is_boundary(split_micro_batch(name)[1])


def describe(judged: Judged) -> str:
    folder, manifest, case = judged.run.folder, judged.run.manifest, judged.evidence.case
    times = f", {manifest.micro_batches} micro-batches" * (manifest.micro_batches > 1)
    about = f"run {manifest.run[:8]} on {manifest.world_size} ranks, {case.dtype}{times}; {judged.coverage()}"
    again = f"equivtest judge {folder} --reference {case.build.partition('#')[0]}"
    if judged.failed:
        return "\n".join(
            "\n".join([*describe_failure(verdict), f"  {'run':9} {about}", f"  {'again':9} {again}"])
            for verdict in judged.failed
        )
    holding, inconclusive = (
        ", ".join(verdict.claim for verdict in judged.verdicts if verdict.kind == kind)
        for kind in ("holds", "inconclusive")
    )
    lines = [f"{folder}: {holding} hold"]
    if inconclusive:
        tensors = judged.evidence.expected.tensors
        undecided = few([name for name in judged.undecided() if not tensors[name].is_inner])
        lines.append(f"{folder}: {inconclusive} inconclusive: the bounds of {undecided} are too wide")
    lines += [f"  {'factor':9} {line}" for verdict in judged.verdicts for line in on_factors(verdict.judgement.factors)]
    return "\n".join([*lines, f"  {'run':9} {about}"])


def compare_runs(one: Judged, other: Judged) -> str:
    """Returns text for the terminal that says which of two runs is wrong.

    Raises:
        Misuse: the two runs have different inputs or parameters, so their results need not agree.
    """
    folders = one.run.folder, other.run.folder
    for name, tensor in one.evidence.inputs.items():
        theirs = other.evidence.inputs.get(name)
        require(
            split_micro_batch(name)[1].split(".")[0] == COTANGENT or (theirs is not None and same_bits(tensor, theirs)),
            f"{folders[0]} and {folders[1]} have different values of {name}, so their results may differ: capture "
            "both on the same batch, from the same parameters",
        )
    failed = [bool(one.failed), bool(other.failed)]
    if all(failed):
        return f"wrong: {folders[0]} and {folders[1]}"
    if any(failed):
        return f"wrong: {folders[failed.index(True)]}; every claim holds on {folders[failed.index(False)]}"
    return _compare_bits(one, other)


def _compare_bits(one: Judged, other: Judged) -> str:
    num, differing = 0, {}
    for name, tensors in _outputs_of_both(one, other):
        num += 1
        if not same_bits(*tensors):
            first, second = (tensor.double() for tensor in tensors)
            differing[name] = float((first - second).abs().max()) / (float(first.square().mean().sqrt()) or 1.0)
    open_ = dict.fromkeys(
        verdict.claim for each in (one, other) for verdict in each.verdicts if verdict.kind != "holds"
    )
    conclusion = f"neither run is shown to be wrong; inconclusive: {', '.join(open_)}" if open_ else "both runs hold"
    if not differing:
        return f"{conclusion}: all {num} outputs and gradients have the same bits in both"
    why = "" if open_ else ", by no more than the order of summation can cause"
    furthest = max(differing, key=lambda name: differing[name])
    return (
        f"{conclusion}: {len(differing)} of {num} outputs and gradients differ in their bits{why}; {furthest} differs "
        f"most, by {differing[furthest]:.1g} times its root mean square"
    )


def _outputs_of_both(one: Judged, other: Judged) -> Iterator[tuple[str, tuple[torch.Tensor, torch.Tensor]]]:
    """Yields (name, (one run's tensor, the other's)) for each unsharded output and gradient that both runs have."""
    others = other.evidence.expected.tensors
    for name, expected in one.evidence.expected.tensors.items():
        shape = tuple(expected.value.shape)
        if _is_boundary_of_any(name) or name.startswith("param.") or name not in others:
            continue
        first, second = (
            put_together(each.evidence.observed, name, shape, each.evidence.case.mesh_shape) for each in (one, other)
        )
        if first is not None and second is not None and tuple(others[name].value.shape) == shape:
            yield name, (first, second)
