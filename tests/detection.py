"""Which values reveal which defect, beside what torch.testing.assert_close says: `python -m tests.detection`.

For each defect: of the draws of each kind of values, in cases drawn by the property that must reject it, how many
the claims reject and how many `assert_close` with its default tolerances rejects, given torch's own unsharded result
in the same dtype and the same slices.  Below, the same of the subjects themselves, where every rejection is a false
alarm.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from rich.console import Console
from rich.table import Table

from equivtest import limits
from equivtest.cases.base import Case
from equivtest.check import judge_replies, one_thread
from equivtest.chunks import Chunk, chunk_cases
from equivtest.defects import DEFECTS
from equivtest.known import SHIPPED, KnownFailures
from equivtest.layout import Partial, flat_axis, local_shape
from equivtest.property import Property
from equivtest.ranks.pool import Pool
from equivtest.ranks.reply import Reply
from equivtest.suite import load_properties, properties_dir
from equivtest.tensors import Placed, slice_local
from tests.test_defects import known_of, property_of
from tests.unsharded import unsharded

WORLD_SIZES = (1, 2, 3, 4)
KINDS = ("dense", "wide", "real", "special")
KIND_OF_MODE = {"index": "dense", "peaked": "dense", "every-bit-pattern": "special"}
"""Modes whose name does not begin with their kind."""


def kind_of(mode: str) -> str:
    """The column of a mode of values."""
    return KIND_OF_MODE.get(mode, mode.partition("-")[0])


@dataclass
class Tally:
    """Draws judged, rejected by the claims, and rejected by assert_close: each by (kind of values, dtype)."""

    judged: Counter[tuple[str, str]] = field(default_factory=Counter)
    rejected: Counter[tuple[str, str]] = field(default_factory=Counter)
    not_close: Counter[tuple[str, str]] = field(default_factory=Counter)

    def add(self, case: Case, draw: int, *, rejected: bool, not_close: bool) -> None:
        key = kind_of(case.values[draw][0]), case.dtype
        self.judged[key] += 1
        self.rejected[key] += rejected
        self.not_close[key] += not_close


def tally(prop: Property, known: KnownFailures, pool: Pool, cases_per_world: int) -> Tally:
    """Runs cases of the property on every world size; those that torch is known to get wrong are left out."""
    found = Tally()
    for world_size in WORLD_SIZES:
        chunk = Chunk(world_size, limits.DTYPES, 0, cases_per_world, "detection")
        cases = [case for case in chunk_cases(prop, chunk) if not known.forbids_run(prop.subject, case)]
        for case, replies in pool.run_all(prop.subject, cases):
            for draw, rejected in rejections(prop, known, case, replies):
                found.add(case, draw, rejected=rejected, not_close=is_not_close(case, draw, replies))
    return found


def rejections(prop: Property, known: KnownFailures, case: Case, replies: list[Reply]) -> Iterator[tuple[int, bool]]:
    """(draw, whether any claim fails on it); a run without answers rejects every draw."""
    verdicts = [v for v in judge_replies(prop.subject, case, replies, prop.claims) if v.failed]
    failed = {v.draw for v in verdicts if not known.match(v.subject, v.claim, v.case, v.kind)}
    answered = all(reply.outcome in ("answered", "not_in_mesh") for reply in replies)
    for draw in range(len(case.values)):
        yield draw, draw in failed or (bool(failed) and not answered)


def is_not_close(case: Case, draw: int, replies: Iterable[Reply]) -> bool:
    """Whether assert_close, with default tolerances, rejects some tensor on some rank."""
    by_process = {reply.rank: reply for reply in replies if reply.outcome != "not_in_mesh"}
    if any(reply.outcome != "answered" for reply in by_process.values()):
        return True
    with one_thread():
        right = unsharded(case, draw)
    return any(
        not is_close(name, placed, right, case, rank)
        for group in case.groups
        for rank, process in enumerate(group)
        for name, placed in by_process[process].answers[draw].tensors.items()
    )


def is_close(name: str, placed: Placed, right: Mapping[str, torch.Tensor], case: Case, rank: int) -> bool:
    """One rank's tensor beside its slice of the unsharded one; padding is left out."""
    if name not in right:
        return True
    shape = tuple(right[name].shape)
    if any(isinstance(placement, Partial) for placement in placed.layout.placements):
        return True  # no rank holds a value that could be compared
    if tuple(placed.local.shape) != local_shape(shape, placed.layout, case.mesh_shape, rank):
        return False
    expected = slice_local(right[name], placed.layout, case.mesh_shape, rank)
    actual = placed.local
    if flat_axis(placed.layout) is not None:
        held = slice_local(torch.ones(shape), placed.layout, case.mesh_shape, rank) == 1
        actual, expected = actual[held], expected[held]
    try:
        torch.testing.assert_close(actual, expected, equal_nan=True)
    except AssertionError:
        return False
    return True


def share(part: Counter[tuple[str, str]], whole: Counter[tuple[str, str]], key: str) -> str:
    """'3/40' of the draws of one kind of values or dtype; '' where there was none."""
    judged = sum(number for names, number in whole.items() if key in names)
    return f"{sum(number for names, number in part.items() if key in names)}/{judged}" if judged else ""


def add_row(table: Table, *row: str) -> None:
    """Tells of the row at once, too, since the table is printed when its last row is done."""
    table.add_row(*row)
    sys.stderr.write("  ".join(row) + "\n")
    sys.stderr.flush()


def show_defects(console: Console, pool: Pool, cases_per_world: int, only: str) -> None:
    """One row per defect; and what only one kind of values catches."""
    table = Table("defect", "claim: kind", *KINDS, *(f"close: {kind}" for kind in KINDS), "only")
    for defect in DEFECTS:
        if only not in defect.name:
            continue
        found = tally(property_of(defect), known_of(defect), pool, cases_per_world)
        caught = [kind for kind in KINDS if any(kind in key for key, number in found.rejected.items() if number)]
        add_row(
            table,
            defect.name,
            f"{defect.claim}: {defect.kind}",
            *(share(found.rejected, found.judged, kind) for kind in KINDS),
            *(share(found.not_close, found.judged, kind) for kind in KINDS),
            caught[0] if len(caught) == 1 else "" if caught else "NONE",
        )
    console.print(table)


def show_clean(console: Console, pool: Pool, cases_per_world: int, only: str) -> None:
    """False alarms of the claims and of assert_close on the subjects themselves, by dtype."""
    table = Table("property", *limits.DTYPES, *(f"close: {dtype}" for dtype in limits.DTYPES), title="false alarms")
    known = KnownFailures.load(SHIPPED)
    for name, prop in load_properties(properties_dir()).items():
        if only not in name or prop.absent or "refuses" in [claim.name for claim in prop.claims]:
            continue
        found = tally(prop, known, pool, cases_per_world)
        add_row(
            table,
            name,
            *(share(found.rejected, found.judged, dtype) for dtype in limits.DTYPES),
            *(share(found.not_close, found.judged, dtype) for dtype in limits.DTYPES),
        )
    console.print(table)


def main() -> None:
    """Parses the command line and prints both tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=20, help="cases per world size and defect")
    parser.add_argument("--clean", type=int, default=60, help="cases per world size and property without a defect")
    parser.add_argument("--only", default="", help="defects and properties whose name contains this")
    chosen = parser.parse_args()
    console = Console(width=200)
    with Pool() as pool:
        show_defects(console, pool, chosen.cases, chosen.only)
        show_clean(console, pool, chosen.clean, chosen.only)


if __name__ == "__main__":
    main()
