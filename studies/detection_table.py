"""Writes the tables of `studies.detection` as Markdown."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from equivtest.base import limits
from tests.defects.defect import Defect

KINDS = ("dense", "wide", "real", "special")

Key = tuple[str, str]


@dataclass
class Tally:
    """Counts the draws of one row, by kind of values and dtype.

    `judged` counts all draws.  `rejected` counts the draws that claims reject, `compared` the draws with an unsharded
    result, `not_close` the draws that assert_close rejects, and `missed` the draws that only claims reject.
    """

    judged: Counter[Key] = field(default_factory=Counter)
    rejected: Counter[Key] = field(default_factory=Counter)
    compared: Counter[Key] = field(default_factory=Counter)
    not_close: Counter[Key] = field(default_factory=Counter)
    missed: Counter[Key] = field(default_factory=Counter)

    def add(self, key: Key, *, rejected: bool, is_close: bool | None) -> None:
        """Counts one draw.  `is_close` is None if there was no unsharded result."""
        self.judged[key] += 1
        self.rejected[key] += rejected
        self.compared[key] += is_close is not None
        self.not_close[key] += is_close is False
        self.missed[key] += rejected and is_close is True

    @staticmethod
    def of(counts: Counter[Key], part: str = "") -> int:
        """Sums the counts of one kind of values or one dtype, or all counts."""
        return sum(number for key, number in counts.items() if part in ("", *key))


@dataclass
class Row:
    """The result for one defect, or for one property without a defect."""

    name: str
    num_planned: int
    kinds: tuple[str, ...]
    num_cases: int = 0
    seconds: float = 0.0
    tally: Tally = field(default_factory=Tally)

    def caught_by(self) -> list[str]:
        return [kind for kind in KINDS if self.tally.of(self.tally.rejected, kind)]

    def only(self) -> str:
        """Returns the only kind of values that caught the defect, NONE if none did, or ''."""
        caught = self.caught_by()
        if not caught:
            return "NONE"
        return caught[0] if len(caught) == 1 < len(self.kinds) else ""


def write_tables(
    defects: Sequence[tuple[Defect, Row]], clean: Sequence[Row], cases: int, enough: int, num_clean: int
) -> str:
    parts = (_families(defects), _of_dtypes(defects, clean), _defects(defects, cases, enough), _clean(clean, num_clean))
    return "\n\n".join("\n".join(part) for part in parts) + "\n"


def _line(*cells: object) -> str:
    return "| " + " | ".join(str(cell) for cell in cells) + " |"


def _head(*names: str) -> Iterator[str]:
    yield _line(*names)
    yield _line(*("---" for _ in names))


def _share(tally: Tally, counts: Counter[Key], part: str = "") -> str:
    """Returns the counted draws of all draws, such as '3/40', or ''."""
    judged = tally.of(tally.compared if counts is tally.not_close else tally.judged, part)
    return f"{tally.of(counts, part)}/{judged}" if judged else ""


def _sum(rows: Iterable[Row]) -> Tally:
    total = Tally()
    for row in rows:
        for name, counts in vars(row.tally).items():
            getattr(total, name).update(counts)
    return total


def _names(rows: Iterable[tuple[Defect, Row]], holds: Callable[[Row], object]) -> str:
    return ", ".join(f"`{defect.name}`" for defect, row in rows if holds(row))


def _families(defects: Sequence[tuple[Defect, Row]]) -> Iterator[str]:
    yield "## By family"
    yield ""
    yield (
        "Draws rejected by the claims and by assert_close; the defects that only one of several kinds of values "
        "caught, that none caught in so few cases, and that assert_close never rejected."
    )
    yield ""
    yield from _head("family", "defects", "claims", "assert_close", "only one kind", "none", "never by assert_close")
    for family in sorted({defect.family for defect, _ in defects}):
        rows = [(defect, row) for defect, row in defects if defect.family == family]
        total = _sum(row for _, row in rows)
        single = ", ".join(f"`{d.name}` ({row.only()})" for d, row in rows if row.only() not in ("", "NONE"))
        never = _names(rows, lambda row: row.tally.of(row.tally.compared) and not row.tally.of(row.tally.not_close))
        none = _names(rows, lambda row: row.only() == "NONE")
        shares = _share(total, total.rejected), _share(total, total.not_close)
        yield _line(family, len(rows), *shares, single, none, never)


def _of_dtypes(defects: Sequence[tuple[Defect, Row]], clean: Sequence[Row]) -> Iterator[str]:
    wrong, right = _sum(row for _, row in defects), _sum(clean)
    yield "## By dtype"
    yield ""
    yield "Draws of defects, and draws of the right subjects, whose rejections are false alarms."
    yield ""
    yield from _head(
        "dtype", "claims reject", "assert_close rejects", "of these claims alone", "false alarms", "of assert_close"
    )
    for dtype in ("", *limits.DTYPES):
        of_defects = (_share(wrong, counts, dtype) for counts in (wrong.rejected, wrong.not_close))
        missed = f"{wrong.of(wrong.missed, dtype)} of {wrong.of(wrong.rejected, dtype)}"
        alarms = (_share(right, counts, dtype) for counts in (right.rejected, right.not_close))
        yield _line(dtype or "all", *of_defects, missed, *alarms)


def _defects(defects: Sequence[tuple[Defect, Row]], cases: int, enough: int) -> Iterator[str]:
    yield "## Defects"
    yield ""
    ends = f", or fewer: until every kind that they draw had been rejected {enough} times" if enough else ""
    yield (
        f"At most {cases} drawn cases on each of the world sizes 1 to 4{ends}. A cell is draws rejected of draws "
        "judged, by kind of values; where fewer cases were run than planned the row ended early, and its shares lean "
        "upwards."
    )
    yield ""
    close = (f"close: {kind}" for kind in KINDS)
    yield from _head("defect", "claim: kind", "cases", *KINDS, *close, "only")
    for defect, row in defects:
        tally, ran = row.tally, f"{row.num_cases} of {row.num_planned}"
        shares = (_share(tally, counts, kind) for counts in (tally.rejected, tally.not_close) for kind in KINDS)
        yield _line(f"`{defect.name}`", f"{defect.claim}: {defect.kind}", ran, *shares, row.only())


def _clean(clean: Sequence[Row], num_clean: int) -> Iterator[str]:
    yield "## False alarms on the subjects themselves"
    yield ""
    yield f"At most {num_clean} drawn cases on each world size, none ended early: draws rejected of draws judged."
    yield ""
    yield from _head("property", "cases", *limits.DTYPES, *(f"close: {dtype}" for dtype in limits.DTYPES))
    for row in clean:
        tally = row.tally
        shares = (_share(tally, counts, d) for counts in (tally.rejected, tally.not_close) for d in limits.DTYPES)
        yield _line(f"`{row.name}`", row.num_cases, *shares)
