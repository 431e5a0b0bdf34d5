"""Compares equivtest and torch.testing.assert_close in the defects they find: `python -m studies.detection`.

Each defect is run on cases drawn by the property that must reject it, without the property's examples.  The table
shows, for each kind of values, how many draws the claims reject and how many `assert_close` rejects.  `assert_close`
compares with the slices of torch's own unsharded result in the same dtype, at its default tolerances.  A defect's row
ends once the claims have rejected it `--enough` times by every kind that its cases draw.  So a row that ended early has
fewer cases, and its shares are too high.  A second table shows the same for the subjects without a defect.  It never
ends early, and every rejection in it is a false alarm.

Writes Markdown (`studies.detection_table`), and prints each row to stderr at once.  Several processes share the rows.
"""

from __future__ import annotations

import argparse
import multiprocessing
import multiprocessing.util
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from pathlib import Path

import torch

from equivtest.base import limits
from equivtest.cases.case import Case
from equivtest.families.training.mixed.case import MixedCase
from equivtest.layout import Partial, flat_axis, local_shape
from equivtest.property import Property
from equivtest.pytest_plugin.suite import shipped
from equivtest.ranks.pool import Pool
from equivtest.ranks.reply import Reply
from equivtest.search.chunks import Chunk, chunk_cases
from equivtest.search.known import SHIPPED, KnownFailures
from equivtest.tensors import Placed, slice_local
from equivtest.verdicts.judging import judge_replies, one_thread
from studies.detection_table import KINDS, Row, write_tables
from tests.defects.defect import defects
from tests.engine.test_defects import property_of
from tests.gate import in_turns, known_of
from tests.unsharded import unsharded

WORLD_SIZES = (1, 2, 3, 4)
KIND_OF_MODE = {"index": "dense", "peaked": "dense", "every-bit-pattern": "special"}
"""Mode of values -> kind of values, for modes whose name does not begin with the kind."""


def kind_of(mode: str) -> str:
    return KIND_OF_MODE.get(mode, mode.partition("-")[0])


@dataclass(frozen=True)
class Task:
    """One row of the table: a defect, or a property without one, and the amount of work on it.

    Attributes:
        cases: Largest number of cases per world size.
        enough: Number of rejections by every kind of values that ends the row. If 0, the row never ends early.
    """

    name: str
    is_defect: bool
    cases: int
    enough: int


def run_task(task: Task) -> Row:
    """Runs the cases of a row on every world size in turn, except cases that torch is known to get wrong."""
    begun_s = time.monotonic()
    prop, known = _judged(task)
    shipped = _replaced(task) if task.is_defect else prop.subject
    cases = [case for case in planned(shipped, prop, task.cases) if not known.forbids_run(prop.subject, case)]
    wanted = {kind_of(mode) for case in cases for mode, _ in case.values}
    row = Row(task.name, num_planned=len(cases), kinds=tuple(kind for kind in KINDS if kind in wanted))
    for case, replies in _pool().run_all(prop.subject, cases):
        row.num_cases += 1
        for draw, rejected in rejections(prop, known, case, replies):
            key = kind_of(case.values[draw][0]), case.dtype
            row.tally.add(key, rejected=rejected, is_close=is_close_on_all_ranks(case, draw, replies))
        if task.enough and all(row.tally.of(row.tally.rejected, kind) >= task.enough for kind in wanted):
            break
    row.seconds = time.monotonic() - begun_s
    return row


def _judged(task: Task) -> tuple[Property, KnownFailures]:
    if not task.is_defect:
        return shipped()[task.name], KnownFailures.load(SHIPPED)
    defect = next(defect for defect in defects() if defect.name == task.name)
    return property_of(defect), known_of(defect)


def _replaced(task: Task) -> str:
    return next(defect.replaces for defect in defects() if defect.name == task.name)


def planned(subject: str, prop: Property, cases_per_world: int) -> list[Case]:
    """Draws the cases of `prop` as if for `subject`, so that all its defects get equal cases."""
    drawn = []
    for world_size in WORLD_SIZES:
        chunk = Chunk(world_size, limits.DTYPES, 1, cases_per_world, "detection")  # chunk 0 has the examples
        drawn.append(chunk_cases(replace(prop, subject=subject), chunk))
    return in_turns(drawn)


@cache
def _pool() -> Pool:
    """Returns this process's pool of ranks, which lives from the first call to the end of the process."""
    pool = Pool()
    multiprocessing.util.Finalize(pool, pool.close, exitpriority=10)
    return pool


@lru_cache(maxsize=1024)
def right(case: Case, draw: int) -> Mapping[str, torch.Tensor] | None:
    """Returns torch's unsharded result, or None for dropout and for refused cases.

    The result is cached, because the defects of a subject run on the same cases.
    """
    if case.refusal or unsharded.dispatch(type(case)) is unsharded.dispatch(object):
        return None
    with one_thread():
        found = unsharded(case, draw)
    return found if isinstance(case, MixedCase) else {name: found[name] for name in found if not is_within_a_step(name)}


def is_within_a_step(name: str) -> bool:
    """True for activations, their gradients, states and storages, which a test without an oracle does not compare."""
    of_hidden = name.endswith(("grad.in_proj.output", "grad.out_proj.input"))
    return of_hidden or any(part in name for part in ("capture.", "momentum.", "exp_avg", "storages"))


def rejections(prop: Property, known: KnownFailures, case: Case, replies: list[Reply]) -> Iterator[tuple[int, bool]]:
    """Yields (draw, True if a claim fails on it), except for draws on which only known failures occur.

    A run without answers rejects every draw.
    """
    verdicts = [v for v in judge_replies(prop.subject, case, replies, prop.claims) if v.failed]
    failed = {v.draw for v in verdicts if not known.match(v.subject, v.claim, v.case, v.kind)}
    expected = {v.draw for v in verdicts} - failed
    answered = all(reply.outcome in ("answered", "not_in_mesh") for reply in replies)
    for draw in range(len(case.values)):
        if draw not in expected:
            yield draw, draw in failed or (bool(failed) and not answered)


def is_close_on_all_ranks(case: Case, draw: int, replies: Iterable[Reply]) -> bool | None:
    """True if assert_close with default tolerances accepts every tensor.  None if there is no unsharded result."""
    whole = right(case, draw)
    if whole is None:
        return None
    by_process = {reply.rank: reply for reply in replies if reply.outcome != "not_in_mesh"}
    if any(reply.outcome != "answered" for reply in by_process.values()):
        return False
    return all(
        is_close(name, placed, whole, case, rank)
        for group in case.groups
        for rank, process in enumerate(group)
        for name, placed in by_process[process].answers[draw].tensors.items()
    )


def is_close(name: str, placed: Placed, whole: Mapping[str, torch.Tensor], case: Case, rank: int) -> bool:
    """True if assert_close accepts a rank's tensor against its slice of the unsharded tensor.  Padding is left out."""
    if name not in whole:
        return True
    shape = tuple(whole[name].shape)
    if any(isinstance(placement, Partial) for placement in placed.layout.placements):
        return True  # no rank holds a value that could be compared
    if tuple(placed.local.shape) != local_shape(shape, placed.layout, case.mesh_shape, rank):
        return False
    expected = slice_local(whole[name], placed.layout, case.mesh_shape, rank)
    actual = placed.local
    if flat_axis(placed.layout) is not None:
        held = slice_local(torch.ones(shape), placed.layout, case.mesh_shape, rank) == 1
        actual, expected = actual[held], expected[held]
    try:
        torch.testing.assert_close(actual, expected, equal_nan=True)
    except AssertionError:
        return False
    return True


def tasks(chosen: argparse.Namespace) -> Iterator[Task]:
    """Yields every requested row.  Rows of the same subject follow each other."""
    for defect in sorted(defects(), key=lambda defect: defect.replaces):
        if chosen.only in defect.name:
            yield Task(defect.name, is_defect=True, cases=chosen.cases, enough=chosen.enough)
    for name, prop in shipped().items():
        if chosen.only in name and not prop.absent and not prop.refuses_only:
            yield Task(name, is_defect=False, cases=chosen.clean, enough=0)


def run_all(wanted: list[Task], num_processes: int) -> dict[Task, Row]:
    found = {}
    with ProcessPoolExecutor(num_processes, multiprocessing.get_context("spawn")) as processes:
        running = {processes.submit(run_task, task): task for task in wanted}
        try:
            for number, future in enumerate(as_completed(running), 1):
                task, row = running[future], future.result()
                found[task] = row
                sys.stderr.write(f"{number}/{len(running)} {row.name} {row.seconds:.1f} s, {row.num_cases} cases\n")
                sys.stderr.flush()
        finally:
            processes.shutdown(cancel_futures=True)  # after an error, instead of all that is left
    return {task: found[task] for task in wanted}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=12, help="cases per world size and defect, at most")
    parser.add_argument("--clean", type=int, default=40, help="cases per world size and property without a defect")
    parser.add_argument("--enough", type=int, default=3, help="rejections by every kind that end a row; 0: none do")
    parser.add_argument("--only", default="", help="defects and properties whose name contains this")
    parser.add_argument("--processes", type=int, default=2, help="rows that are made at a time")
    parser.add_argument("--out", type=Path, help="file for the tables, Markdown; without it they are printed")
    chosen = parser.parse_args()
    begun_s = time.monotonic()
    rows = run_all(list(tasks(chosen)), chosen.processes)
    rejected = [
        (defect, rows[task]) for defect in defects() for task in rows if task.is_defect and task.name == defect.name
    ]
    clean = [row for task, row in rows.items() if not task.is_defect]
    text = write_tables(rejected, clean, chosen.cases, chosen.enough, chosen.clean)
    text += f"\n{time.monotonic() - begun_s:.0f} s in {chosen.processes} processes.\n"
    if chosen.out:
        chosen.out.write_text(text)
    else:
        sys.stdout.write(text)


if __name__ == "__main__":
    main()
