"""Defines the command, which runs the requested measurements and prints their tables."""

from __future__ import annotations

import sys
from collections.abc import Callable
from enum import StrEnum
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from equivtest.errors import Misuse
from studies.speed.compared import measure_fetches
from studies.speed.measure import main_properties
from studies.speed.phases import measure_phases
from studies.speed.remote import measure_remote
from studies.speed.show import fetches_table, phases_table, remote_table, throughput_table
from studies.speed.throughput import measure_throughput

SUBJECTS = ("colwise_linear", "rowwise_linear", "zero3_fetch_all_gather", "zero3_fetch_all_reduce")
"""Subjects that are measured by default.  Measuring all subjects takes most of an hour."""

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


class Benchmark(StrEnum):
    throughput = "throughput"
    phases = "phases"
    fetch = "fetch"
    remote = "remote"


TABLES: dict[Benchmark, Callable[[int, int, tuple[str, ...]], Table]] = {
    Benchmark.throughput: lambda *amount: throughput_table(measure_throughput(*amount)),
    Benchmark.phases: lambda _, cases, subjects: phases_table(measure_phases(cases, subjects)),
    Benchmark.fetch: lambda repeats, *_: fetches_table(measure_fetches(repeats)),
    Benchmark.remote: lambda *amount: remote_table(measure_remote(*amount)),
}


@app.command()
def main(
    which: Annotated[list[Benchmark] | None, typer.Argument(help="Benchmarks to run; all by default.")] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Repetitions of what is compared.")] = 3,
    cases: Annotated[int, typer.Option(min=1, help="Cases per subject and world size.")] = 20,
    subjects: Annotated[str, typer.Option(help="Subjects of throughput and phases, by comma; empty: all.")] = ",".join(
        SUBJECTS
    ),
) -> None:
    """Measures the harness beside bare programs, in one run.  Compare ratios, not seconds."""
    chosen = tuple(filter(None, map(str.strip, subjects.split(","))))
    try:
        main_properties(chosen)
    except Misuse as error:
        raise SystemExit(str(error)) from None
    console = Console(width=None if sys.stdout.isatty() else 140)
    for name in which or Benchmark:
        console.print(TABLES[name](repeats, cases, chosen), "")
