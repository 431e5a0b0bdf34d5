"""What becomes of the same cases of each operator on several releases of torch: tables of docs/releases.md.

Source: files of `python -m studies.operator_coverage`, one or more of each release; a case counts where every release
has drawn it.  What an operator takes is asked of the installed torch, so that some draws differ.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path

from packaging.version import Version

from studies.json_lines import lines_of

RIGHT = ("holds",)
REFUSED = ("refused", "gradient refused", "not supported")
FAILS = ("wrong", "wrong gradient", "raises", "hangs", "ends its process")

Cases = dict[str, dict[str, str]]
"""Case -> release -> what became of it."""


def swept(files: Iterable[Path]) -> dict[str, Cases]:
    """The cases of each operator, in the order of the first file."""
    operators: dict[str, Cases] = defaultdict(lambda: defaultdict(dict))
    for line in lines_of(*files):
        for case, (outcome, _) in line["outcomes"].items():
            operators[line["operator"]][case][line["torch"]] = outcome
    return operators


def beside(operators: dict[str, Cases]) -> str:
    """How many cases end how, what changes from release to release, what is refused altogether, and what fails."""
    drawn = {release for cases in operators.values() for found in cases.values() for release in found}
    releases = sorted(drawn, key=Version)
    shared = {
        name: {case: found for case, found in cases.items() if len(found) == len(releases)}
        for name, cases in operators.items()
    }
    every = [found for cases in shared.values() for found in cases.values()]
    num_drawn = sum(map(len, operators.values()))
    alone = [f"`{name}`" for name, cases in shared.items() if not cases]
    lines = [f"{len(every)} cases were drawn on each release, and {num_drawn - len(every)} on some."]
    lines += [f"Not on each release: {', '.join(alone)}."] if alone else []
    lines += [""]
    lines += [*totals(every, releases), "", *changes(every, releases), ""]
    lines += [*refused_whole(shared, releases), "", *rows(shared, releases)]
    return "\n".join(lines) + "\n"


def row(*cells: object) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def totals(every: list[dict[str, str]], releases: list[str]) -> Iterator[str]:
    """A row for each outcome that some case has."""
    yield row("cases", *releases)
    yield row(*["---"] * (1 + len(releases)))
    for outcome in (*RIGHT, *REFUSED, *FAILS):
        nums = [sum(found[release] == outcome for found in every) for release in releases]
        if any(nums):
            yield row(outcome, *nums)


def changes(every: list[dict[str, str]], releases: list[str]) -> Iterator[str]:
    """From each release to the next: how many cases ended otherwise."""
    groups = {"holds": RIGHT, "refused": REFUSED, "fails": FAILS}
    pairs = [(a, b) for a in groups for b in groups if a != b]
    yield row("from, to", *(f"{a} -> {b}" for a, b in pairs))
    yield row(*["---"] * (1 + len(pairs)))
    for old, new in pairwise(releases):
        nums = [sum(found[old] in groups[a] and found[new] in groups[b] for found in every) for a, b in pairs]
        yield row(f"{old}, {new}", *nums)


def refused_whole(operators: dict[str, Cases], releases: list[str]) -> Iterator[str]:
    """Names of operators of which a release refuses every case."""
    for release in releases:
        names = [
            f"`{name}`"
            for name, cases in operators.items()
            if cases and all(found[release] == "refused" for found in cases.values())
        ]
        yield f"- {release} refuses all cases of {len(names)} operators{': ' if names else '.'}{', '.join(names)}"


def rows(operators: dict[str, Cases], releases: list[str]) -> Iterator[str]:
    """Operators that fail on some release, with what became of their cases, and which release mends or breaks some."""
    yield row("operator", "cases", *releases, "changes")
    yield row(*["---"] * (3 + len(releases)))
    for name, cases in operators.items():
        found = list(cases.values())
        if any(outcome in FAILS for each in found for outcome in each.values()):
            cells = [in_words(Counter(each[release] for each in found)) for release in releases]
            yield row(f"`{name}`", len(found), *cells, changes_in_words(found, releases))


def in_words(outcomes: Counter[str]) -> str:
    """'wrong 3, refused 2', or 'holds'."""
    told = [f"{outcome} {outcomes[outcome]}" for outcome in (*FAILS, *REFUSED) if outcomes[outcome]]
    return ", ".join(told) or "holds"


def changes_in_words(found: list[dict[str, str]], releases: list[str]) -> str:
    """'2.13.0 mends 3' for cases that hold there and failed before; 'breaks' for those that fail and did not."""
    told = []
    for old, new in pairwise(releases):
        mended = sum(each[old] in FAILS and each[new] in RIGHT for each in found)
        broken = sum(each[old] not in FAILS and each[new] in FAILS for each in found)
        told += [f"{new} {verb} {num}" for verb, num in (("mends", mended), ("breaks", broken)) if num]
    return ", ".join(told)
