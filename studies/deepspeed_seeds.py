"""How soon fresh seeds find what a DeepSpeed release gets wrong: `python -m studies.deepspeed_seeds --seeds 5`.

The release is the one on PYTHONPATH.  Each row is a run of its own, as `make deepspeed` does it on one process: new
ranks, the property's own strategy, smaller worlds first, no pinned example; it ends with the first search that fails,
once all that failed in it is shrunk.
"""

from __future__ import annotations

import argparse
import dataclasses
import secrets
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from equivtest.base import limits
from equivtest.base.profiles import PROFILES, plan
from equivtest.errors import Misuse
from equivtest.property import Property
from equivtest.pytest_plugin.suite import shipped, version_of
from equivtest.ranks.backend import Backend
from equivtest.ranks.pool import Pool
from equivtest.report.handover import Failure
from equivtest.search.chunks import Chunk
from equivtest.search.known import SHIPPED, KnownFailures
from equivtest.search.search import Findings, search


@dataclass(frozen=True)
class Row:
    """What one seed found of one property: `seconds` from nothing to the shrunk failures, or to the end."""

    name: str
    seed: str
    seconds: float
    num_cases: int
    failures: list[Failure]


def run_seed(name: str, prop: Property, known: KnownFailures, seed: str, profile: str) -> Row:
    """Searches the property's parts until one fails."""
    begun_s, num_cases, failures = time.monotonic(), 0, []
    with Pool(Backend(imports=("deepspeed",))) as pool, tempfile.TemporaryDirectory() as folder:
        for findings in searches(prop, known, seed, profile, pool, Path(folder)):
            if findings.misuse:
                raise Misuse(findings.misuse)
            num_cases += len({str(record.case) for record in findings.records})
            failures = findings.failures
            if failures:
                break
    return Row(name, seed, time.monotonic() - begun_s, num_cases, failures)


def searches(
    prop: Property, known: KnownFailures, seed: str, profile: str, pool: Pool, folder: Path
) -> Iterator[Findings]:
    """One search per part of the property, without its pinned examples."""
    drawn = dataclasses.replace(prop, examples=())
    for part in plan(PROFILES[profile], limits.WORLD_SIZES, prop.weight):
        chunk = Chunk(part.world_size, limits.DTYPES, part.index, part.num_cases, seed)
        yield search(drawn, chunk, pool, known, folder)


def show(row: Row) -> None:
    """A line per failure, or one where there is none."""
    place = f"{row.name:28} {row.seed:10} {row.seconds:6.1f} s {row.num_cases:4} cases"
    for failure in row.failures:
        print(f"{place}  {failure.claim}: {failure.kind}\n    {failure.case}", flush=True)
    if not row.failures:
        print(f"{place}  holds", flush=True)


def show_medians(rows: list[Row]) -> None:
    """How many seeds failed, and how long they took."""
    seconds: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        seconds[row.name] += [row.seconds] * bool(row.failures)
    for name, taken in seconds.items():
        seeds = sum(row.name == name for row in rows)
        median = f", median {statistics.median(taken):.1f} s" if taken else ""
        print(f"{name:28} {len(taken)} of {seeds} seeds failed{median}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5, help="how many fresh ones")
    parser.add_argument("--seed", action="append", default=[], help="this one; may be repeated, replaces fresh ones")
    parser.add_argument("--profile", choices=[*PROFILES], default="gate", help="how many cases a seed has at most")
    parser.add_argument("--only", default="deepspeed", help="properties whose name contains this")
    chosen = parser.parse_args()
    known = KnownFailures.load(SHIPPED)
    properties = {n: p for n, p in shipped().items() if p.requires and chosen.only in n}
    for absent in {prop.absent for prop in properties.values()} - {""}:
        print(absent)
        return 2
    print(f"deepspeed {version_of('deepspeed')}, torch {version_of('torch')}", flush=True)
    rows = []
    for name, prop in properties.items():
        for seed in chosen.seed or [secrets.token_hex(4) for _ in range(chosen.seeds)]:
            rows.append(run_seed(name, prop, known, seed, chosen.profile))
            show(rows[-1])
    show_medians(rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
