"""Ranks over TCP beside those of this machine, as a table and as a panel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.table import Table

from studies.speed.remote import Distant
from studies.speed.show import make_table, plot_by_ranks, ratio_cells


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
    plot_by_ranks(axes, [(each.subject, each.world_size, each.ratio) for each in found])
    axes.set_ylabel("throughput over TCP / without")
    axes.set_title("Ranks over TCP beside ranks of this machine")
