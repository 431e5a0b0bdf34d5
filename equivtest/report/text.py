"""Writes the summary of a run as plain text, for the terminal and for summary.txt."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from equivtest.base.lacking import RELEASE
from equivtest.base.profiles import SHARD_KINDS
from equivtest.report import cells, margins
from equivtest.report.audits import in_lines
from equivtest.report.columns import aligned
from equivtest.report.coverage import Covered
from equivtest.report.handover import Audited, BackendFault, KnownState
from equivtest.report.tally import Tally
from equivtest.verdicts.message import on_factors
from equivtest.verdicts.verdict import FAILING

BEGUN, ENDED = "begun", "ended"
"""States of a run.  Any other state is a sentence that says why the run ended early."""
FIRST_LOOK = "smoke is a first look, at a few cases on each number of ranks: what holds here may fail in --profile gate"
NUM_SLOWEST = 3
NUM_NAMES = 6  # collectives in one line; if there are more, the line lists their dtypes
SHORT_DTYPES = {"float32": "f32", "float64": "f64", "bfloat16": "bf16", "float16": "f16"}


def summarize(
    tallies: Sequence[Tally],
    *,
    seconds: float,
    known: Sequence[KnownState] = (),
    audits: Sequence[Audited] = (),
    is_brief: bool = False,
    wants_cells: bool = False,
    headlines: Sequence[str] = (),
    left_out: Sequence[str] = (),
    is_first_look: bool = False,
    levels: Sequence[str] = (),
) -> list[str]:
    """Returns the lines of the summary.  If no property was searched, only the headlines remain.

    Args:
        is_brief: True for the lines alone on which a reader can act: no tables, no counts of values, no slowest cases
            and no known failures.
        headlines: Reasons, other than failing claims, why the run is red. These lines come first.
        left_out: Lines on the incomplete properties that were left out, with the reasons.
        is_first_look: True if the last line has to say that the profile is a first look.
        wants_cells: True if the summary counts the cells that lack conclusive verdicts.
    """
    if not tallies:
        return list(headlines)
    notes = [f"cells   {thin}" for tally in tallies if wants_cells and (thin := cells.in_words(tally))]
    refused = [f"dtypes  {tally.listed.name}: {line}" for tally in tallies for line in tally.left_out_in_words()]
    declined = [
        f"program {tally.listed.name}: does not support {tally.declined.total():,} of {tally.layouts:,} cases: "
        + tally.why_declined
        for tally in tallies
        if tally.declined
    ]
    notes += [f"factor  {tally.listed.name}: {line}" for tally in tallies for line in on_factors(tally.factors)]
    notes += [line for tally in tallies for line in _not_passed(tally)]
    notes += in_lines(audits)
    if unaudited := [tally.listed.name for tally in tallies if tally.lacks_audit]:
        notes.append(f"audit   not selected, so green claims may show nothing: {', '.join(unaudited)}")
    notes += [f"left    {reason}" for reason in left_out]
    notes += refused + declined + [f"torch   {line}" for tally in tallies for line in tally.torchs_in_words()]
    notes += _lacking(tallies)
    return [
        *headlines,
        *levels,
        *([] if is_brief else _details(tallies, known)),
        *notes,
        "",
        *totals(tallies, seconds),
        *[FIRST_LOOK] * is_first_look,
    ]


def _details(tallies: Sequence[Tally], known: Sequence[KnownState]) -> list[str]:
    shares = [f"values  {tally.listed.name}: {_shares_text(tally.modes)}" for tally in tallies if len(tally.modes) > 1]
    return [
        *_counts_table(tallies),
        "",
        *_coverage_table(tallies),
        "",
        *_margins_table(tallies),
        *shares,
        *(f"slow    {line}" for line in _slowest(tallies)),
        *(f"known   {entry.id}: {entry.state}: {entry.reason}" for entry in known),
    ]


def headline(environment: Mapping[str, Any], tallies: Iterable[Tally]) -> str:
    """Returns the first line of a report on a run that has not ended or ended early, or '' for a complete run."""
    if environment["complete"]:
        return ""
    state = environment.get("state", ENDED)
    if state == BEGUN:
        return (
            f"This run began at {environment['started']} in process {environment['process']} and has not ended; "
            "if that process is gone, it was killed."
        )
    tallies = list(tallies)
    how = "" if state == ENDED else f" ({state})"
    if not tallies:
        return "This run judged nothing." if state == ENDED else f"This run did not end{how}: nothing was judged."
    return f"This run did not end{how}: {'; '.join(unfinished(tallies)) or 'its results so far stand below'}."


def unfinished(tallies: Iterable[Tally]) -> list[str]:
    """Returns a line such as '3 of 4 searches of rowwise_linear ended' for each interrupted property."""
    return [
        f"{tally.num_ended} of {len(tally.listed.planned)} searches of {tally.listed.name} ended"
        for tally in tallies
        if not tally.is_complete
    ]


def on_faults(faults: Iterable[BackendFault]) -> list[str]:
    """Returns one line per wrong collective, and one line on ranks that died.  Each line quotes one fault."""
    by_collective: dict[str, list[str]] = {}
    for fault in faults:
        by_collective.setdefault(fault.collective, []).append(fault.text)
    return [
        f"{'the backend is wrong' if collective else 'a rank died between two cases'}: {min(texts)}"
        + (f" (and {len(texts) - 1} more{' of this collective' if collective else ''})" if len(texts) > 1 else "")
        for collective, texts in by_collective.items()
    ]


def on_lacking(tallies: Iterable[Tally], allowed: Collection[str]) -> list[str]:
    """Returns a line on everything that the backend does not support and is not `allowed` to lack, or []."""
    counts = sum((tally.not_allowed(allowed) for tally in tallies), Counter())
    if not counts:
        return []
    names = sorted({name for _, _, refused in counts for name in (refused or [RELEASE])})
    if len(names) > NUM_NAMES:
        names = sorted({name.partition(":")[0] for name in names})
    what = ", ".join(name.replace(":", " ") for name in names)
    return [
        f"not supported: {counts.total():,} verdicts, because the backend lacks {what}, so this run does not pass. "
        f"Use --dtypes to leave a dtype out, or --allow-unsupported {','.join(names)} to allow what is lacking"
    ]


def on_declined(tallies: Iterable[Tally]) -> list[str]:
    """Returns one line for each property about which a green run shows nothing."""
    return [f"nothing is shown: {why}" for tally in tallies if (why := tally.none_supported)]


def totals(tallies: Iterable[Tally], seconds: float) -> list[str]:
    tallies = list(tallies)
    outcomes = Counter[str](result.outcome for tally in tallies for result in tally.claims())
    cut, unbegun = sum(tally.cut for tally in tallies), sum(tally.unbegun for tally in tallies)
    torchs = sum(cases.total() for tally in tallies for cases in tally.torchs.values())
    covered = Covered.all_of(tally.covered for tally in tallies)
    words = {"passed": "hold", "failed": "failed", "xfailed": "known to fail", "skipped": "open"}
    verdicts = {
        "failed": FAILING, "known": ("known",), "inconclusive": ("inconclusive",), "not supported": ("not_supported",),
    }  # fmt: skip
    if any(tally.declined for tally in tallies):
        verdicts["declined"] = ("declined",)
    return [
        f"{sum(t.layouts for t in tallies):,} layouts, {sum(t.draws for t in tallies):,} draws (layout x values), "
        f"{sum(t.judged for t in tallies):,} claims judged in {seconds:.0f} s",
        ", ".join(f"{sum(t.total(*kinds) for t in tallies):,} {word}" for word, kinds in verdicts.items())
        + f"; of {outcomes.total()} claims "
        + ", ".join(f"{outcomes[outcome]} {word}" for outcome, word in words.items() if outcomes[outcome]),
        *[f"{torchs:,} of the known failures are failures of torch: the same cases fail on gloo and the CPU too"]
        * bool(torchs),
        *[covered] * bool(covered),
        *[f"the budget left out {cut:,} cases: each search ran first the cases that cover most"] * bool(cut),
        *[f"the budget left out {unbegun:,} searches, which had not begun"] * bool(unbegun),
    ]


def _not_passed(tally: Tally) -> list[str]:
    """Returns one line for each reason why claims are open or known to fail."""
    by_reason: dict[str, list[str]] = {}
    for result in tally.claims():
        if result.outcome in ("skipped", "xfailed"):
            word = "known" if result.outcome == "xfailed" else "open"
            by_reason.setdefault(f"{word:<7} {tally.listed.name}: {result.text}", []).append(result.claim)
    return [f"{reason}: {', '.join(claims)}" for reason, claims in by_reason.items()]


def _lacking(tallies: Iterable[Tally]) -> list[str]:
    """Returns one unshortened line for each reason why the backend refuses cases.  Vendors need the whole text."""
    counts = Counter[str]()
    for tally in tallies:
        for (_, reason, _), count in tally.lacking.items():
            counts[reason] += count
    return [f"unsupp  {' '.join(reason.split())}: {count} verdicts" for reason, count in sorted(counts.items())]


def _counts_table(tallies: Sequence[Tally]) -> list[str]:
    """Returns the table of counts by property.  A rare outcome has a column only if it occurs."""
    columns: list[tuple[str, list[int], bool]] = [
        ("layouts", [t.layouts for t in tallies], True),
        ("draws", [t.draws for t in tallies], True),
        ("claims", [t.judged for t in tallies], True),
        ("failed", [t.total(*FAILING) for t in tallies], True),
        ("refused", [t.refused for t in tallies], True),
        ("known", [t.total("known") for t in tallies], False),
        ("inconcl", [t.total("inconclusive") for t in tallies], False),
        ("unsupp", [t.total("not_supported") for t in tallies], False),
        ("declined", [t.total("declined") for t in tallies], False),
    ]
    shown = [["property", *(tally.listed.name for tally in tallies), "all"]]
    shown += [
        [title, *(f"{count:,}" for count in (*counts, sum(counts)))]
        for title, counts, always in columns
        if always or any(counts)
    ]
    return aligned(list(zip(*shown, strict=True)))


def _coverage_table(tallies: Sequence[Tally]) -> list[str]:
    sizes = sorted({size for tally in tallies for size in tally.world_sizes})
    dtypes = [name for name in SHORT_DTYPES if any(tally.dtypes[name] for tally in tallies)]
    rows = [("", *(f"w{size}" for size in sizes), *(SHORT_DTYPES[name] for name in dtypes), *SHARD_KINDS)]
    rows += [_coverage_row(tally.listed.name, [tally], sizes, dtypes) for tally in tallies]
    rows.append(_coverage_row("all", tallies, sizes, dtypes))
    return ["layouts by world size, and shares of dtypes and shards in %", *aligned(rows)]


def _coverage_row(name: str, tallies: Sequence[Tally], sizes: list[int], dtypes: list[str]) -> tuple[str, ...]:
    layouts = sum(tally.layouts for tally in tallies)
    by_size = sum((tally.world_sizes for tally in tallies), Counter[int]())
    by_dtype = sum((tally.dtypes for tally in tallies), Counter[str]())
    by_kind = sum((tally.shard_kinds for tally in tallies), Counter[str]())
    shares = [by_dtype[dtype] for dtype in dtypes] + [by_kind[kind] for kind in SHARD_KINDS]
    return name, *(str(by_size[size]) for size in sizes), *(_percent(share, layouts) for share in shares)


def _margins_table(tallies: Sequence[Tally]) -> list[str]:
    """Returns the table of margins by tensor and dtype over all properties, or [] if no draw has a margin."""
    table = margins.merged(tally.margins for tally in tallies)
    if not table:
        return []
    title = "margins on real values: number of draws whose largest error / allowed error is up to each power of two"
    return [title, *aligned([margins.HEAD, *margins.rows(table)]), ""]


def _slowest(tallies: Sequence[Tally]) -> list[str]:
    found = [(seconds, tally.listed.subject, case) for tally in tallies for seconds, case in tally.slowest]
    return [f"{seconds:.2f} s {subject} {case}" for seconds, subject, case in sorted(found, reverse=True)[:NUM_SLOWEST]]


def _shares_text(counts: Mapping[str, int]) -> str:
    total = sum(counts.values())
    return ", ".join(f"{name} {_percent(counts[name], total)} %" for name in sorted(counts))


def _percent(part: int, whole: int) -> str:
    return str(round(100 * part / whole)) if whole else "-"
