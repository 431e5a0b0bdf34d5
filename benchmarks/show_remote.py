"""Ranks over TCP beside those of this machine, as a table and as a panel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.table import Table

from benchmarks.remote import Distant
from benchmarks.show import BARE_COLOUR, errors, make_table, ratio_cells


def remote_table(found: Sequence[Distant]) -> Table:
    """One line per subject and world size."""
    columns = ("subject", "ranks", "cases", "throughput / local", "min..max", "start / local", "min..max")
    table = make_table("Ranks over TCP beside ranks of this machine", columns)
    for each in found:
        numbers = (str(each.world_size), str(each.num_cases))
        table.add_row(each.subject, *numbers, *ratio_cells(each.ratio), *ratio_cells(each.start))
    return table


def plot_remote(axes: Any, found: Sequence[Distant]) -> None:
    """Throughput over TCP as a part of that without, by world size."""
    for subject in dict.fromkeys(each.subject for each in found):
        own = [each for each in found if each.subject == subject]
        spreads = [each.ratio for each in own]
        medians = [spread.median for spread in spreads]
        axes.errorbar([each.world_size for each in own], medians, errors(spreads), label=subject, capsize=2)
    axes.set_xscale("log", base=2)
    axes.axhline(1, color=BARE_COLOUR, linestyle="--")
    axes.set_xlabel("ranks")
    axes.set_ylabel("throughput over TCP / without")
    axes.set_title("Ranks over TCP beside ranks of this machine")
    axes.legend(fontsize="small")
