"""Makes tables of the measurements."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.box import SIMPLE_HEAD
from rich.table import Table

from studies.speed.compared import Compared
from studies.speed.measure import Spread
from studies.speed.phases import PHASES, Breakdown
from studies.speed.remote import Distant
from studies.speed.throughput import TARGET, Pair, overall


def throughput_table(pairs: Sequence[Pair]) -> Table:
    """Returns a table with one line per subject and world size, and one line for all together."""
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
    table = make_table("Duration of each phase of a case, median ms", ("case", "ranks", *PHASES))
    for found in breakdowns:
        parts = [f"{found.median_ms[phase]:.1f}" for phase in PHASES]
        table.add_row(found.family, str(found.world_size), *parts)
    return table


def fetches_table(found: Sequence[Compared]) -> Table:
    return _compared_table("200 parameters fetched by all_reduce beside all_gather, slowest rank, median ms", found)


def _compared_table(title: str, found: Sequence[Compared]) -> Table:
    first, second = found[0].seconds
    columns = ("setting", "ranks", "part", f"{first} ms", f"{second} ms", f"{second} / {first}", "min..max", "turns")
    table = make_table(title, columns)
    for row in found:
        times = [f"{1000 * spread.median:.3f}" for spread in row.seconds.values()]
        table.add_row(row.setting, str(row.world_size), row.part, *times, *ratio_cells(row.ratio), str(row.ratio.count))
    return table


def remote_table(found: Sequence[Distant]) -> Table:
    columns = ("subject", "ranks", "cases", "throughput / local", "min..max", "start / local", "min..max")
    table = make_table("Ranks over TCP beside ranks of this machine", columns)
    for each in found:
        numbers = (str(each.world_size), str(each.num_cases))
        table.add_row(each.subject, *numbers, *ratio_cells(each.ratio), *ratio_cells(each.start))
    return table


def ratio_cells(spread: Spread) -> tuple[str, str]:
    return f"{spread.median:.2f}", f"{spread.low:.2f}..{spread.high:.2f}"


def make_table(title: str, columns: Iterable[str]) -> Table:
    table = Table(
        title=title, title_justify="left", box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0)
    )
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left", no_wrap=True)
    return table
