"""Judges a run that happened in another job.  This starts no rank, and executes nothing in the run's folder."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from equivtest.captured.format.folder import CapturedRank, CapturedRun
from equivtest.captured.judge.evidence import forwards_in
from equivtest.captured.judge.report import Judged, describe
from equivtest.captured.judge.update import update_in
from equivtest.cases.case import require
from equivtest.errors import EquivtestError
from equivtest.oracle.declared import declared, load_arithmetics
from equivtest.programs.micro_batches import split_micro_batch
from equivtest.programs.outputs import OUTPUT
from equivtest.programs.reference import call_builder
from equivtest.ranks.reply import Answer, Reply
from equivtest.tensors import Placed
from equivtest.verdicts.claims import (
    Claim,
    agrees_on_all_ranks,
    does_not_touch_its_inputs,
    equals_unsharded,
    gradients_equal_unsharded,
    trains_like_unsharded,
)
from equivtest.verdicts.compare import compare
from equivtest.verdicts.judging import one_thread, require_conclusion

AUTOCAST = ("bfloat16", "float16")
UPDATE_CLAIMS: tuple[Claim, ...] = (trains_like_unsharded, agrees_on_all_ranks)
CLAIMS: tuple[Claim, ...] = (
    equals_unsharded,
    gradients_equal_unsharded,
    agrees_on_all_ranks,
    does_not_touch_its_inputs,
)


def judge_run(run: CapturedRun, reference: str, arithmetic: str = "") -> Judged:
    """Judges a captured run by the unsharded model that `reference` builds.

    Args:
        reference: 'package.module:NAME' or 'file.py:NAME' of the function that builds the unsharded model.
        arithmetic: Name of the declared arithmetic of the device that computed the run. If '', this is the arithmetic
            that torch has on the CPU.

    Raises:
        Misuse: the run belongs to another model, or no run can have written such files.
        Inconclusive: the run shows neither that the claims hold nor that one fails.
    """
    manifest = run.manifest
    reference = f"{reference}#{manifest.part}" if manifest.part else reference
    _require_same_model(run, reference)
    with one_thread(), declared(load_arithmetics(arithmetic)):
        if manifest.optimizer:
            claims, evidence = UPDATE_CLAIMS, update_in(run, reference)
        else:
            claims, evidence = CLAIMS, forwards_in(run, _under_autocast(reference, manifest.autocast))
        replies = [_reply_of(rank, run.ranks[rank], tensors) for rank, tensors in evidence.observed.items()]
        verdicts = compare(str(run.folder), evidence.case, 0, [evidence.expected], replies, claims)
    require_conclusion(str(run.folder), evidence.case, verdicts)
    return Judged(run, evidence, verdicts)


def _under_autocast(reference: str, autocast: str) -> str:
    if not autocast:
        return reference
    return reference + "#" * (1 if "#" in reference else 2) + autocast.removeprefix("cpu:")


def _reply_of(number: int, rank: CapturedRank, tensors: Mapping[str, Placed]) -> Reply:
    """Makes a reply with these tensors.  Its requires_grad flags show which outputs have no gradient."""
    outputs = [name for name in tensors if split_micro_batch(name)[1].split(".")[0] == OUTPUT]
    flags = {name: rank.entry(name).requires_grad for name in outputs}
    touched = tuple(f"{name}: values have changed" for name in rank.manifest.touched)
    return Reply(rank=number, outcome="answered", answers=(Answer(tensors, flags, touched),))


def _require_same_model(run: CapturedRun, reference: str) -> None:
    parameters, autocast = run.manifest.parameters, run.manifest.autocast
    built = {name: each for name, each in call_builder(reference).named_parameters() if each.is_floating_point()}
    other = f"{run.folder} is of another model than {reference}"
    missing, unknown = sorted(built.keys() - parameters.keys()), sorted(parameters.keys() - built.keys())
    require(not missing, f"{other}: it has no parameter {''.join(missing[:1])}{_way_out(parameters, built)}")
    require(not unknown, f"{other}: the reference has no parameter {''.join(unknown[:1])}")
    for name, each in built.items():
        shape, flag = parameters[name].shape, parameters[name].requires_grad
        require(
            shape == tuple(each.shape),
            f"{other}: parameter {name} has shape {shape} in the run, but {tuple(each.shape)} in the reference; if the "
            "ranks have plain parts of it, not DTensors, pass capture(placed=, shapes=)",
        )
        require(
            flag == each.requires_grad,
            f"{other}: parameter {name} has requires_grad={flag} in the run, but {each.requires_grad} in the reference",
        )
    require(
        autocast in ("", *(f"cpu:{dtype}" for dtype in AUTOCAST)),
        f"{run.folder}: the model ran under autocast {autocast}, which converts other operations than the CPU's "
        "autocast, under which the reference runs: enter autocast in the model's forward, and build the reference so "
        "too",
    )


def _way_out(captured: Collection[str], built: Collection[str]) -> str:
    """Returns which submodule to capture, if the captured model only wraps the reference's model, or ''."""
    first = min(built)
    prefixes = {name.removesuffix(f".{first}") for name in captured if name.endswith(f".{first}")}
    wrapped = next((each for each in prefixes if {*captured} == {f"{each}.{name}" for name in built}), "")
    return f", but {wrapped}.{first}: capture the part of that name, capture(module.{wrapped}, ...)" if wrapped else ""


def judge_parts(parts: Sequence[Path], reference: str, arithmetic: str, num_jobs: int) -> Iterator[tuple[int, str]]:
    """Yields (exit code, report) for each submodule that was captured alone, in order.

    Each process has only one submodule's tensors in memory.

    Args:
        num_jobs: Number of processes that judge at the same time. If 1, this process judges.
    """
    if num_jobs == 1:
        for part in parts:
            yield _judge_part(part, reference, arithmetic)
            gc.collect()  # hooks and their graph refer to each other
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
