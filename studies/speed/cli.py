"""The command: measures what is asked for, prints it, writes JSON and a plot."""

from __future__ import annotations

import functools
import json
import os
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from equivtest.errors import Misuse
from equivtest.pytest_plugin.suite import version_of
from studies.speed.communication import Sent, measure_communication
from studies.speed.compared import measure_embeddings, measure_fetches
from studies.speed.first import measure_first
from studies.speed.measure import main_properties
from studies.speed.peers import measure_peers
from studies.speed.phases import measure_phases
from studies.speed.remote import Distant, measure_remote
from studies.speed.scale import measure_scale
from studies.speed.show import (  # fmt: skip
    phases_table,
    plot,
    plot_phases,
    plot_throughput,
    plot_worlds,
    throughput_table,
    worlds_rows,
    worlds_table,
)
from studies.speed.show_compared import (  # fmt: skip
    communication_table,
    embeddings_table,
    fetches_table,
    plot_communication,
    plot_embeddings,
    plot_fetches,
)
from studies.speed.show_peers import peers_table, plot_peers
from studies.speed.show_remote import plot_remote, remote_table
from studies.speed.show_scale import first_table, plot_first, plot_scale, scale_table
from studies.speed.throughput import TARGET, Pair, measure_throughput, overall
from studies.speed.worlds import WorldTimes, measure_worlds

SUBJECTS = ("colwise_linear", "rowwise_linear", "zero3_fetch_all_gather", "zero3_fetch_all_reduce")
"""Of which throughput and phases are measured where nobody says otherwise: all would take most of an hour."""

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


class Benchmark(StrEnum):
    """What can be measured."""

    worlds = "worlds"
    throughput = "throughput"
    phases = "phases"
    cold = "cold"
    scale = "scale"
    peers = "peers"
    communication = "communication"
    embedding = "embedding"
    fetch = "fetch"
    remote = "remote"


@dataclass(frozen=True)
class Amount:
    """How much is measured: repetitions of what is compared, cases per subject and world size, subjects."""

    repeats: int
    cases: int
    subjects: tuple[str, ...]


@dataclass(frozen=True)
class Way:
    """How one benchmark is measured, printed, drawn and written."""

    measure: Callable[[Amount], Any]
    table: Callable[[Any], Table]
    plot: Callable[[Any, Any], None]
    as_data: Callable[[Any], Any]


def _worlds_data(found: WorldTimes) -> dict[str, Any]:
    ratios = {label: asdict(spread) for label, spread in worlds_rows(found)}
    return {"cold_s": asdict(found.cold_s), "of_cold": ratios}


def _throughput_data(pairs: list[Pair]) -> dict[str, Any]:
    rows = [{**asdict(pair), "ratio": asdict(pair.ratio)} for pair in pairs]
    return {"overall": asdict(overall(pairs)), "target": TARGET, "pairs": rows}


def _communication_data(found: list[Sent]) -> list[dict[str, Any]]:
    sums = ("bytes_documented", "bytes_recorded")
    return [{**asdict(sent), **{name: getattr(sent, name) for name in sums}} for sent in found]


def _remote_data(found: list[Distant]) -> list[dict[str, Any]]:
    return [{**asdict(each), "ratio": asdict(each.ratio)} for each in found]


def _rows(found: list[Any]) -> list[dict[str, Any]]:
    return [asdict(row) for row in found]


WAYS = {
    Benchmark.worlds: Way(lambda a: measure_worlds(a.repeats), worlds_table, plot_worlds, _worlds_data),
    Benchmark.throughput: Way(
        lambda a: measure_throughput(a.repeats, a.cases, a.subjects),
        throughput_table,
        plot_throughput,
        _throughput_data,
    ),
    Benchmark.phases: Way(lambda a: measure_phases(a.cases, a.subjects), phases_table, plot_phases, _rows),
    Benchmark.cold: Way(lambda a: measure_first(a.repeats), first_table, plot_first, asdict),
    Benchmark.scale: Way(lambda a: measure_scale(a.repeats), scale_table, plot_scale, _rows),
    Benchmark.peers: Way(lambda a: measure_peers(a.repeats, a.cases), peers_table, plot_peers, _rows),
    Benchmark.communication: Way(
        lambda _: measure_communication(), communication_table, plot_communication, _communication_data
    ),
    Benchmark.embedding: Way(lambda a: measure_embeddings(a.repeats), embeddings_table, plot_embeddings, _rows),
    Benchmark.fetch: Way(lambda a: measure_fetches(a.repeats), fetches_table, plot_fetches, _rows),
    Benchmark.remote: Way(
        lambda a: measure_remote(a.repeats, a.cases, a.subjects), remote_table, plot_remote, _remote_data
    ),
}


@app.command()
def main(
    which: Annotated[list[Benchmark] | None, typer.Argument(help="What to measure; all by default.")] = None,
    out: Annotated[Path, typer.Option(help="Where bench.json and bench.png go.")] = Path("report/bench"),
    repeats: Annotated[int, typer.Option(min=1, help="Repetitions of what is compared.")] = 3,
    cases: Annotated[int, typer.Option(min=1, help="Cases per subject and world size.")] = 20,
    subjects: Annotated[str, typer.Option(help="Of throughput and phases, by comma; all: empty.")] = ",".join(SUBJECTS),
) -> None:
    """Measures the harness beside bare programs and peers, in one run; compare ratios, not seconds."""
    begun_s = time.monotonic()
    amount = Amount(repeats, cases, tuple(filter(None, map(str.strip, subjects.split(",")))))
    try:
        main_properties(amount.subjects)
    except Misuse as error:
        raise SystemExit(str(error)) from None
    console = Console(width=None if sys.stdout.isatty() else 140)
    results: dict[str, Any] = {"environment": _environment()}
    panels: list[Callable[[Any], None]] = []
    for name in [name for name in Benchmark if name in (which or Benchmark)]:
        way = WAYS[name]
        found = way.measure(amount)
        console.print(way.table(found), "")
        results[name.value] = way.as_data(found)
        panels.append(functools.partial(_draw, way, found))
    results["environment"]["seconds"] = round(time.monotonic() - begun_s, 1)
    out.mkdir(parents=True, exist_ok=True)
    (out / "bench.json").write_text(json.dumps(results, indent=2) + "\n")
    plot(out / "bench.png", panels)
    console.print(f"{results['environment']['seconds']:.0f} s; {out / 'bench.json'}, {out / 'bench.png'}")


def _draw(way: Way, found: Any, axes: Any) -> None:
    way.plot(axes, found)


def _environment() -> dict[str, Any]:
    """What another run must share for its seconds to mean the same."""
    return {
        "equivtest": version_of("equivtest"),
        "torch": version_of("torch"),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cores": os.cpu_count(),
        "load_before": os.getloadavg()[0],
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
