"""What is right and wrong in a run that happened elsewhere: no rank is started, and nothing in its folder is run."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from equivtest.captured.format.folder import CapturedRun
from equivtest.captured.judge.answers import (
    Held,
    case_of_all,
    flags_of,
    given_to_all,
    held_of_all,
    micro_batches_of,
    touched_on,
)
from equivtest.captured.judge.inputs import dtype_of
from equivtest.captured.judge.update import expect_captured_update
from equivtest.cases.case import require
from equivtest.check import one_thread, require_conclusion
from equivtest.errors import EquivtestError
from equivtest.oracle.declared import declared, load_arithmetics
from equivtest.oracle.expected import Expected
from equivtest.programs.boundaries import CHOSEN, is_boundary
from equivtest.programs.case import ModuleCase
from equivtest.programs.micro_batches import split_micro_batch
from equivtest.programs.oracle.accumulated import expect_accumulated
from equivtest.programs.reference import call_builder
from equivtest.ranks.reply import Answer, Reply
from equivtest.report.parts import PartTree
from equivtest.verdicts.claims import (
    agrees_on_all_ranks,
    does_not_touch_its_inputs,
    equals_unsharded,
    gradients_equal_unsharded,
    trains_like_unsharded,
)
from equivtest.verdicts.compare import compare
from equivtest.verdicts.elements import is_too_wide
from equivtest.verdicts.message import describe_failure, few, on_factors
from equivtest.verdicts.verdict import Verdict

VALUES = tuple(claim.name for claim in (equals_unsharded, gradients_equal_unsharded, trains_like_unsharded))
AUTOCAST = ("bfloat16", "float16")
UPDATE_CLAIMS = (trains_like_unsharded, agrees_on_all_ranks)
CLAIMS = (equals_unsharded, gradients_equal_unsharded, agrees_on_all_ranks, does_not_touch_its_inputs)


@dataclass(frozen=True)
class Judged:
    """The verdicts on a run, and on how much of it.

    Attributes:
        expected: What is right of it.
        held: What its ranks held, as it was judged.
        given: Whole inputs, parameters and cotangents.
    """

    run: CapturedRun
    case: ModuleCase
    verdicts: Sequence[Verdict]
    expected: Expected
    held: Held
    given: Mapping[str, torch.Tensor]

    @property
    def failed(self) -> list[Verdict]:
        """Those that reject the run, in the order of the claims."""
        return [verdict for verdict in self.verdicts if verdict.failed]

    def parts(self) -> PartTree:
        """What was concluded of each part of the model."""
        judgements = [verdict.judgement for verdict in self.verdicts]
        parts = {name: margin for judged in judgements for name, margin in judged.parts.items()}
        wrong = (mismatch.tensor for judged in judgements for mismatch in judged.mismatches)
        tree = PartTree()
        tree.add(parts, next((name for name in wrong if name in parts), ""))
        return tree

    def open(self) -> str:
        """In words, what no bound and nothing else decides."""
        names = [name for name in self._open() if not self.expected.tensors[name].is_inner]
        return f"no bound says something of {few(names)}"

    def _open(self) -> list[str]:
        """What is neither wrong nor near enough, and has a bound that says nothing."""
        judging = [verdict for verdict in self.verdicts if verdict.claim in VALUES]
        agreeing = {name for verdict in judging for name in verdict.judgement.agreeing}
        return [name for name, right in self.expected.tensors.items() if is_too_wide(right) and name not in agreeing]

    def _in_no_group(self) -> str:
        """In words, which parameters have a gradient and are not updated: right of each is what it was."""
        grouped = {name for group in self.run.manifest.groups for name in group.parameters}
        names = [name for name in self.run.manifest.parameters if f"grad.{name}" in self.given and name not in grouped]
        return f"; with a gradient, but in no group: {few(names)}" if names else ""

    def coverage(self) -> str:
        """How many boundaries were judged, in words; of an update how many tensors that it left."""
        if self.run.manifest.optimizer:
            num, open_ = len(self.expected.tensors), len(self._open())
            told = f"{num - open_} of {num} tensors judged that {self.run.manifest.optimizer} left"
            return told + self._in_no_group()
        captured = {name for held in self.held.values() for name in held if is_judged(name)}
        found = {name: right for name, right in self.expected.tensors.items() if is_boundary_of_any(name)}
        wide = sum(map(is_boundary_of_any, self._open()))
        written = {name for held in self.run.held.values() for name in held if is_judged(name)}
        parts = [f"{len(found) - wide} of {len(written)} boundaries judged"]
        parts += [f"{wide} whose bound says nothing"] * bool(wide)
        parts += [f"{len(captured - found.keys())} under no layout"] * bool(captured - found.keys())
        parts += [f"{len(written - captured)} that the reference has not"] * bool(written - captured)
        return ", ".join(parts)


def is_judged(name: str) -> bool:
    """Whether an answer is a boundary; what was chosen is followed where it is right, and not judged by itself."""
    return is_boundary_of_any(name) and not name.endswith(CHOSEN)


def is_boundary_of_any(name: str) -> bool:
    """Whether an answer is a boundary of some micro-batch."""
    return is_boundary(split_micro_batch(name)[1])


def judge_run(run: CapturedRun, reference: str, arithmetic: str = "") -> Judged:
    """The verdicts on a run, beside the unsharded model that `reference` builds.

    Raises:
        Misuse: the run is of another model, or its files say what no run says.
        Inconclusive: nothing is shown.
    """
    part = run.manifest.part
    if run.manifest.optimizer:
        return _judge_update(run, reference, arithmetic)
    _check_model(run, reference := f"{reference}#{part}" if part else reference)
    if run.manifest.autocast:
        reference += "#" * (1 if part else 2) + run.manifest.autocast.removeprefix("cpu:")
    micro_batches = micro_batches_of(run, reference)
    case, held = case_of_all(micro_batches), held_of_all(micro_batches)
    with one_thread(), declared(load_arithmetics(arithmetic)):
        expected = expect_accumulated(micro_batches)
        replies = [
            Reply(
                rank=rank,
                outcome="answered",
                answers=(Answer(tensors, flags_of(run.held[rank], tensors), touched_on(run.held[rank])),),
            )
            for rank, tensors in held.items()
        ]
        verdicts = compare(str(run.folder), case, 0, [expected], replies, CLAIMS)
    require_conclusion(str(run.folder), case, verdicts)
    return Judged(run, case, verdicts, expected, held, given_to_all(micro_batches))


def _judge_update(run: CapturedRun, reference: str, arithmetic: str) -> Judged:
    """The verdicts on one update of an optimizer."""
    _check_model(run, reference)
    with one_thread(), declared(load_arithmetics(arithmetic)):
        case, expected, held, given = expect_captured_update(run, reference, dtype_of(run))
        replies = [
            Reply(rank=rank, outcome="answered", answers=(Answer(tensors, {}),)) for rank, tensors in held.items()
        ]
        verdicts = compare(str(run.folder), case, 0, [expected], replies, UPDATE_CLAIMS)
    require_conclusion(str(run.folder), case, verdicts)
    return Judged(run, case, verdicts, expected, held, given)


def _wrapped_in(told: Collection[str], built: Collection[str]) -> str:
    """Returns the way out if the run is of a wrapper around the model that the reference builds."""
    first = min(built)
    prefixes = {name.removesuffix(f".{first}") for name in told if name.endswith(f".{first}")}
    found = next((each for each in prefixes if {*told} == {f"{each}.{name}" for name in built}), "")
    return f", but {found}.{first}: capture the part of that name, capture(module.{found}, ...)" if found else ""


def _check_model(run: CapturedRun, reference: str) -> None:
    """Raises Misuse unless the run is of the model that the function builds."""
    told = run.manifest.parameters
    built = {name: each for name, each in call_builder(reference).named_parameters() if each.is_floating_point()}
    other = f"{run.folder} is of another model than {reference}"
    missing, unknown = [*(built.keys() - told.keys())], [*(told.keys() - built.keys())]
    require(not missing, f"{other}: it has no parameter {''.join(sorted(missing)[:1])}{_wrapped_in(told, built)}")
    require(not unknown, f"{other}: the reference has no parameter {''.join(sorted(unknown)[:1])}")
    for name, each in built.items():
        shape, flag = told[name].shape, told[name].requires_grad
        require(
            shape == tuple(each.shape),
            f"{other}: parameter {name} is of shape {shape} in the run, {tuple(each.shape)} in the reference; a part "
            "of it that is no DTensor needs capture(placed=, shapes=)",
        )
        require(
            flag == each.requires_grad,
            f"{other}: parameter {name} has requires_grad={flag} in the run, {each.requires_grad} in the reference",
        )
    require(
        run.manifest.autocast in ("", *(f"cpu:{dtype}" for dtype in AUTOCAST)),
        f"{run.folder}: the model ran under autocast, {run.manifest.autocast}, which rounds elsewhere than the CPU's: "
        "have its forward enter autocast of a device that the reference has too",
    )


def describe(judged: Judged) -> str:
    """What was concluded of a run, for the terminal."""
    names = [verdict.claim for verdict in judged.verdicts if verdict.kind == "holds"]
    told = judged.run.manifest
    times = f", {told.micro_batches} micro-batches" * (told.micro_batches > 1)
    where = f"run {told.run[:8]} on {told.world_size} ranks, {judged.case.dtype}{times}; {judged.coverage()}"
    again = f"equivtest judge {judged.run.folder} --reference {judged.case.build.partition('#')[0]}"
    if judged.failed:
        return "\n".join(
            "\n".join([*describe_failure(verdict), f"  {'run':9} {where}", f"  {'again':9} {again}"])
            for verdict in judged.failed
        )
    open_ = [verdict.claim for verdict in judged.verdicts if verdict.kind == "inconclusive"]
    lines = [f"{judged.run.folder}: {', '.join(names)} hold"]
    lines += [f"{judged.run.folder}: {', '.join(open_)} inconclusive: {judged.open()}"] * bool(open_)
    lines += [f"  {'factor':9} {line}" for verdict in judged.verdicts for line in on_factors(verdict.judgement.factors)]
    return "\n".join([*lines, f"  {'run':9} {where}"])


def judge_parts(parts: Sequence[Path], reference: str, arithmetic: str, num_jobs: int) -> Iterator[tuple[int, str]]:
    """Exit code and what is told of each part that was captured alone, in order; each is forgotten before the next.

    Args:
        num_jobs: How many processes judge at once; 1 for this one.
    """
    if num_jobs == 1:
        for part in parts:
            yield _judge_part(part, reference, arithmetic)
            gc.collect()  # hooks and the graph that they hang on hold each other
        return
    with ThreadPoolExecutor(num_jobs) as threads:
        yield from threads.map(lambda part: _judge_elsewhere(part, reference, arithmetic), parts)


def _judge_part(part: Path, reference: str, arithmetic: str) -> tuple[int, str]:
    try:
        judged = judge_run(CapturedRun(part), reference, arithmetic)
    except EquivtestError as error:
        return 2, f"equivtest: {error}"
    return int(bool(judged.failed)), describe(judged)


def _judge_elsewhere(part: Path, reference: str, arithmetic: str) -> tuple[int, str]:
    command = [sys.executable, "-m", "equivtest.cli", "judge", str(part), "--reference", reference]
    command += ["--arithmetic", arithmetic] * bool(arithmetic)
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    return (ended.returncode if ended.returncode in (0, 1) else 2), (ended.stdout + ended.stderr).rstrip()
