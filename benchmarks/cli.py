"""The command: measures what is asked for, prints it, writes JSON and a plot."""

from __future__ import annotations

import json
import os
import platform
import time
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from benchmarks.phases import measure_phases
from benchmarks.show import phases_table, plot, throughput_table, worlds_rows, worlds_table
from benchmarks.throughput import TARGET, measure_throughput, overall
from benchmarks.worlds import measure_worlds
from equivtest.suite import version_of

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


class Benchmark(StrEnum):
    """What can be measured."""

    worlds = "worlds"
    throughput = "throughput"
    phases = "phases"


@app.command()
def main(
    which: Annotated[list[Benchmark] | None, typer.Argument(help="What to measure; all by default.")] = None,
    out: Annotated[Path, typer.Option(help="Where bench.json and bench.png go.")] = Path("report/bench"),
    repeats: Annotated[int, typer.Option(min=1, help="Repetitions of what is compared.")] = 3,
    cases: Annotated[int, typer.Option(min=1, help="Cases per subject and world size.")] = 20,
) -> None:
    """Measures the harness beside bare rank programs, in one run; compare ratios, not seconds."""
    chosen = set(which or Benchmark)
    begun_s = time.monotonic()
    console = Console()
    worlds = measure_worlds(repeats) if Benchmark.worlds in chosen else None
    pairs = measure_throughput(repeats, cases) if Benchmark.throughput in chosen else []
    breakdowns = measure_phases(cases) if Benchmark.phases in chosen else []
    results: dict[str, Any] = {"environment": _environment()}
    if worlds is not None:
        console.print(worlds_table(worlds), "")
        ratios = {label: asdict(spread) for label, spread in worlds_rows(worlds)}
        results["worlds"] = {"cold_s": asdict(worlds.cold_s), "of_cold": ratios}
    if pairs:
        console.print(throughput_table(pairs), "")
        rows = [{**asdict(pair), "ratio": asdict(pair.ratio)} for pair in pairs]
        results["throughput"] = {"overall": asdict(overall(pairs)), "target": TARGET, "pairs": rows}
    if breakdowns:
        console.print(phases_table(breakdowns), "")
        results["phases"] = [asdict(found) for found in breakdowns]
    results["environment"]["seconds"] = round(time.monotonic() - begun_s, 1)
    out.mkdir(parents=True, exist_ok=True)
    (out / "bench.json").write_text(json.dumps(results, indent=2) + "\n")
    plot(out / "bench.png", worlds, pairs, breakdowns)
    console.print(f"{results['environment']['seconds']:.0f} s; {out / 'bench.json'}, {out / 'bench.png'}")


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
