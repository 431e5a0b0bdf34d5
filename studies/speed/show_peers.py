"""The comparison with torch's own test bases, as a table and as a panel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.table import Table

from studies.speed.peers import HARNESS, LOOPS, PEERS, Rate
from studies.speed.show import HARNESS_COLOUR, errors, make_table, ratio_cells


def peers_table(rates: Sequence[Rate]) -> Table:
    """One line per way to judge and world size."""
    columns = ("way", "ranks", "draws/s", "ours / this", "min..max", "claims or tensors/s", "ours / this", "min..max")
    table = make_table("Verdicts per second on the same cases, beside torch's own test bases", columns)
    for rate in rates:
        numbers = (f"{rate.draws_per_s.median:.2f}", *ratio_cells(rate.ratio_draws))
        table.add_row(
            rate.way, str(rate.world_size), *numbers, f"{rate.claims_per_s.median:.2f}", *ratio_cells(rate.ratio_claims)
        )
    return table


def plot_peers(axes: Any, rates: Sequence[Rate]) -> None:
    """Draws judged per second, by way and world size, log scale."""
    ways = [HARNESS, *LOOPS, *PEERS.values()]
    for number, way in enumerate(ways):
        own = [rate for rate in rates if rate.way == way]
        places = [index + 0.14 * (number - (len(ways) - 1) / 2) for index in range(len(own))]
        spreads = [rate.draws_per_s for rate in own]
        colour = HARNESS_COLOUR if way == HARNESS else f"C{number}"
        medians = [spread.median for spread in spreads]
        axes.bar(places, medians, 0.12, yerr=errors(spreads), label=way, color=colour, capsize=2)
    sizes = sorted({rate.world_size for rate in rates})
    axes.set_xticks(range(len(sizes)), [f"{size} ranks" for size in sizes])
    axes.set_yscale("log")
    axes.set_ylabel("draws judged per second, log scale")
    axes.set_title("Verdicts on the same cases: the harness and torch's own test bases")
    axes.legend(fontsize="small", ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.08))
