"""What has been measured, as tables and as a plot."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from studies.speed.measure import Spread
from studies.speed.phases import PHASES, Breakdown
from studies.speed.throughput import TARGET, Pair, overall
from studies.speed.worlds import WorldTimes

BARE_COLOUR, HARNESS_COLOUR = "0.45", "tab:blue"


def worlds_rows(times: WorldTimes) -> list[tuple[str, Spread]]:
    """What is told of worlds, each as a multiple of the cold world's time."""
    rows = [("start and first case", times.started), ("steady case", times.steady)]
    for rank in range(len(times.heard)):
        rows.append((f"rank {rank}: killed to all heard", times.heard[rank]))
        rows.append((f"rank {rank}: all heard to next answer", times.replaced[rank]))
        rows.append((f"rank {rank}: end noticed to next answer", times.recovered[rank]))
    return rows


def worlds_table(times: WorldTimes) -> Table:
    """One line per thing that a warm world does."""
    table = make_table(
        f"World of 4, as a part of a cold spawned one ({times.cold_s.median:.1f} s here)",
        ("what", "median", "min..max", "repetitions"),
    )
    for label, spread in worlds_rows(times):
        table.add_row(label, f"{spread.median:.4f}", f"{spread.low:.4f}..{spread.high:.4f}", str(spread.count))
    return table


def throughput_table(pairs: Sequence[Pair]) -> Table:
    """One line per subject and world size, and all together."""
    columns = ("subject", "ranks", "cases", "cases/s", "/ bare loop", "min..max")
    table = make_table("Speed of the harness beside a bare loop over the same rank programs", columns)
    for pair in pairs:
        size, rate = (str(pair.world_size), str(pair.num_cases)), f"{pair.rate.median:.1f}"
        table.add_row(pair.subject, *size, rate, *ratio_cells(pair.ratio))
    table.add_section()
    num_cases = sum(pair.num_cases for pair in pairs)
    table.add_row(f"overall (target {TARGET:.2f})", "", str(num_cases), "", *ratio_cells(overall(pairs)))
    return table


def phases_table(breakdowns: Iterable[Breakdown]) -> Table:
    """One line per kind of case and world size."""
    table = make_table("Where the time of a case goes, median ms", ("case", "ranks", *PHASES))
    for found in breakdowns:
        parts = [f"{found.median_ms[phase]:.1f}" for phase in PHASES]
        table.add_row(found.family, str(found.world_size), *parts)
    return table


def plot(path: Path, panels: Sequence[Callable[[Any], None]]) -> None:
    """One panel below the other, each drawn by its function, to a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.6 * len(panels)), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, draw in zip(figure.subplots(len(panels), squeeze=False)[:, 0], panels, strict=True):
        draw(axes)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)


def plot_worlds(axes: Any, times: WorldTimes) -> None:
    """What a warm world does, as parts of the cold one's time."""
    labels, spreads = zip(*reversed(worlds_rows(times)), strict=True)
    axes.barh(labels, [spread.median for spread in spreads], xerr=errors(spreads), color=HARNESS_COLOUR, capsize=3)
    axes.set_xscale("log")
    axes.axvline(1, color=BARE_COLOUR, linestyle="--")
    axes.set_xlabel("time / time of a cold spawned world with one case (dashed), log scale")
    axes.set_title("World of 4 ranks: median, bars from min to max")


def plot_throughput(axes: Any, pairs: Sequence[Pair]) -> None:
    """Speed beside the bare loop, by subject and world size."""
    subjects = list(dict.fromkeys(pair.subject for pair in pairs))
    for number, subject in enumerate(subjects):
        own = [pair for pair in pairs if pair.subject == subject]
        places = [pair.world_size + 0.19 * (number - (len(subjects) - 1) / 2) for pair in own]
        spreads = [pair.ratio for pair in own]
        medians = [spread.median for spread in spreads]
        axes.bar(places, medians, 0.17, yerr=errors(spreads), label=subject, capsize=2)
    axes.axhline(1, color=BARE_COLOUR, linestyle="--", label="bare loop")
    axes.axhline(TARGET, color="black", linestyle=":", label=f"target overall, {TARGET:.2f}")
    axes.set_xticks(sorted({pair.world_size for pair in pairs}))
    axes.set_xlabel("ranks")
    axes.set_ylabel("cases per second, harness / bare loop")
    axes.set_title(f"Speed of the harness: overall {overall(pairs).median:.2f} of the bare loop's")
    axes.legend(fontsize="small", ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.14))


def plot_phases(axes: Any, breakdowns: Sequence[Breakdown]) -> None:
    """Parts of a case's time."""
    labels = [f"{found.family}, {found.world_size}" for found in breakdowns]
    left = [0.0] * len(breakdowns)
    for phase in PHASES:
        parts = [100 * found.median_ms[phase] / sum(found.median_ms.values()) for found in breakdowns]
        axes.barh(labels, parts, left=left, label=phase)
        left = [start + part for start, part in zip(left, parts, strict=True)]
    axes.invert_yaxis()
    axes.set_xlabel("% of a case's time when nothing overlaps, from medians")
    axes.set_title("Where the time of a case goes, by kind of case and number of ranks")
    axes.legend(fontsize="small", ncols=len(PHASES) // 2, loc="upper center", bbox_to_anchor=(0.5, -0.14))


def plot_by_ranks(axes: Any, found: Iterable[tuple[str, int, Spread]], ideal: str | None = None) -> None:
    """A line for each label, its spread by world size; 1 is dashed, and called `ideal` in the legend."""
    found = tuple(found)
    for label in dict.fromkeys(label for label, _, _ in found):
        own = [(world_size, spread) for each, world_size, spread in found if each == label]
        spreads = [spread for _, spread in own]
        medians = [spread.median for spread in spreads]
        axes.errorbar([world_size for world_size, _ in own], medians, errors(spreads), label=label, capsize=2)
    axes.set_xscale("log", base=2)
    axes.axhline(1, color=BARE_COLOUR, linestyle="--", label=ideal)
    axes.set_xlabel("ranks")
    axes.legend(fontsize="small")


def errors(spreads: Sequence[Spread]) -> list[list[float]]:
    """Lengths of the bars below and above the medians."""
    below = [spread.median - spread.low for spread in spreads]
    return [below, [spread.high - spread.median for spread in spreads]]


def ratio_cells(spread: Spread) -> tuple[str, str]:
    """Median, and smallest to largest."""
    return f"{spread.median:.2f}", f"{spread.low:.2f}..{spread.high:.2f}"


def make_table(title: str, columns: Iterable[str]) -> Table:
    """A table without rows; numbers stand to the right."""
    table = Table(
        title=title, title_justify="left", box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0)
    )
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left", no_wrap=True)
    return table
