"""Large worlds and the first verdict, as tables and as panels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.table import Table

from studies.speed.first import FirstVerdict
from studies.speed.scale import Scaled
from studies.speed.show import HARNESS_COLOUR, errors, make_table, plot_by_ranks, ratio_cells


def scale_table(found: Sequence[Scaled]) -> Table:
    """One line per case and world size."""
    ideal = ("/ (alone x ranks / cores)", "min..max")
    columns = ("case", "ranks", "first ms", "steady ms", *ideal, "/ bare loop", "min..max", "unique MiB per rank")
    table = make_table("A case in ever larger worlds", columns)
    for scaled in found:
        times = (f"{1000 * scaled.start_s:.0f}", f"{1000 * scaled.steady_s.median:.1f}")
        row = (
            str(scaled.world_size),
            *times,
            *ratio_cells(scaled.of_ideal),
            *ratio_cells(scaled.of_bare),
            f"{scaled.unique_mib:.1f}",
        )
        table.add_row(scaled.family, *row)
    return table


def first_table(found: FirstVerdict) -> Table:
    """One line per part, and the first verdict over what cannot be avoided."""
    table = make_table("From nothing to the first verdict", ("what", "median", "min..max"))
    for part, spread in found.parts_s.items():
        table.add_row(f"{part}, s", f"{spread.median:.2f}", f"{spread.low:.2f}..{spread.high:.2f}")
    table.add_row("first verdict / (import torch + server)", *ratio_cells(found.ratio))
    return table


def plot_scale(axes: Any, found: Sequence[Scaled]) -> None:
    """Steady time over the ideal, by world size."""
    steady = [(scaled.family, scaled.world_size, scaled.of_ideal) for scaled in found]
    plot_by_ranks(axes, steady, ideal="single ranks / cores")
    axes.set_ylabel("time / (time of one rank x ranks / cores)")
    axes.set_title("A case in ever larger worlds")


def plot_first(axes: Any, found: FirstVerdict) -> None:
    """Seconds of each part."""
    spreads = list(found.parts_s.values())
    medians = [spread.median for spread in spreads]
    axes.barh(list(found.parts_s), medians, xerr=errors(spreads), color=HARNESS_COLOUR, capsize=3)
    axes.invert_yaxis()
    axes.set_xlabel("s")
    axes.set_title(f"First verdict: {found.ratio.median:.2f} of (import torch + server)")
