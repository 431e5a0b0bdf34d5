"""Two ways beside each other, and what they send, as tables and as panels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.table import Table

from equivtest.base.collective import Collective
from studies.speed.communication import FORMULAS, Sent
from studies.speed.compared import Compared
from studies.speed.show import BARE_COLOUR, errors, make_table, ratio_cells


def embeddings_table(found: Sequence[Compared]) -> Table:
    """One line per layout of the output, world size and phase."""
    return _compared_table("Embedding by rows beside the same by columns, slowest rank, median ms", found)


def fetches_table(found: Sequence[Compared]) -> Table:
    """One line per size of the parameters, world size and part."""
    return _compared_table("200 parameters fetched by all_reduce beside all_gather, slowest rank, median ms", found)


def _compared_table(title: str, found: Sequence[Compared]) -> Table:
    first, second = found[0].seconds
    columns = ("setting", "ranks", "part", f"{first} ms", f"{second} ms", f"{second} / {first}", "min..max", "turns")
    table = make_table(title, columns)
    for row in found:
        times = [f"{1000 * spread.median:.3f}" for spread in row.seconds.values()]
        table.add_row(row.setting, str(row.world_size), row.part, *times, *ratio_cells(row.ratio), str(row.ratio.count))
    return table


def communication_table(found: Sequence[Sent]) -> Table:
    """One line per layout of the output, world size, style and phase."""
    columns = ("output", "ranks", "style", "phase", "documented", "formula", "recorded on gloo", "sent", "as recorded")
    table = make_table(
        "What an embedding sends beside the scatter of its table, bytes; output of n elements of b bytes", columns
    )
    for sent in found:
        formula = ", ".join(FORMULAS[call.kind] for call in sent.documented)
        cells = (_in_words(sent.documented), formula or "-", _in_words(sent.recorded), f"{sent.bytes_documented:,.0f}")
        place = (sent.output, str(sent.world_size), sent.style, sent.phase)
        table.add_row(*place, *cells, f"{sent.bytes_recorded:,.0f}")
    return table


def _in_words(calls: Sequence[Collective]) -> str:
    return ", ".join(f"{call.kind} of {call.size_bytes:,}" for call in calls) or "-"


def plot_embeddings(axes: Any, found: Sequence[Compared]) -> None:
    """Ratios, by layout of the output."""
    _plot_ratios(axes, found, "Embedding: time by rows / time by columns")


def plot_fetches(axes: Any, found: Sequence[Compared]) -> None:
    """Ratios, by size of the parameters."""
    _plot_ratios(axes, found, "Fetch of 200 parameters: time by all_reduce / time by all_gather")


def _plot_ratios(axes: Any, found: Sequence[Compared], title: str) -> None:
    parts = list(dict.fromkeys(row.part for row in found))
    settings = list(dict.fromkeys((row.setting, row.world_size) for row in found))
    width = 0.8 / len(parts)
    for number, part in enumerate(parts):
        ratios = [row.ratio for row in found if row.part == part]
        places = [index + width * (number - (len(parts) - 1) / 2) for index in range(len(settings))]
        axes.bar(places, [ratio.median for ratio in ratios], width, yerr=errors(ratios), label=part, capsize=2)
    axes.set_xticks(range(len(settings)), [f"{setting}\n{size} ranks" for setting, size in settings])
    axes.axhline(1, color=BARE_COLOUR, linestyle="--", label="as fast")
    axes.set_yscale("log")
    axes.set_ylabel("ratio, log scale")
    axes.set_title(title)
    axes.legend(fontsize="small", ncols=len(parts) + 1)


def plot_communication(axes: Any, found: Sequence[Sent]) -> None:
    """KiB that a rank sends on a ring, forward and backward, by style."""
    settings = list(dict.fromkeys((sent.output, sent.world_size) for sent in found))
    for number, style in enumerate(dict.fromkeys(sent.style for sent in found)):
        sums = [
            sum(
                sent.bytes_documented
                for sent in found
                if (sent.output, sent.world_size, sent.style) == (*setting, style)
            )
            for setting in settings
        ]
        places = [index + 0.4 * (number - 0.5) for index in range(len(settings))]
        axes.bar(places, [size / 1024 for size in sums], 0.4, label=style)
    axes.set_xticks(range(len(settings)), [f"{output}\n{size} ranks" for output, size in settings])
    axes.set_ylabel("KiB sent per rank, forward and backward")
    axes.set_title("Embedding: what the documented collectives send on a ring, by layout of the output")
    axes.legend(fontsize="small")
