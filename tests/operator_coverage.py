"""How each operator of DTensors is judged: prints a table, and everything that fails.

    python -m tests.operator_coverage [CASES_PER_OPERATOR [FIRST [LAST]]]

One row per operator, one column per kind of placement and direction.  `=` equal, `~` within a bound, `?` nothing
concluded, `R` refused on every rank alike, `X` failed (a known failure of torch too), each with the number of draws.
"""

from __future__ import annotations

import sys
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterable

import torch

from equivtest import limits
from equivtest.check import expected_of, judge_replies, one_thread
from equivtest.families.operators.case import OperatorCase
from equivtest.families.operators.case_table import OPERATORS
from equivtest.families.operators.strategy import operator_cases
from equivtest.property import Space
from equivtest.ranks.pool import Pool
from equivtest.ranks.reply import Reply
from equivtest.verdicts.claims import equals_unsharded, gradients_equal_unsharded
from equivtest.verdicts.elements import is_too_wide
from equivtest.verdicts.verdict import Verdict
from tests.drawing import drawn

CLAIMS = {"forward": equals_unsharded, "gradient": gradients_equal_unsharded}
KINDS = ("replicate", "shard", "partial")

Counts = Counter[tuple[str, str, str]]


def kind_of(case: OperatorCase) -> str:
    """The worst placement of an operand."""
    texts = [text for placements in case.placements for text in placements]
    return next((kind for kind in ("partial", "shard") if any(text.startswith(kind) for text in texts)), "replicate")


def signs_of(case: OperatorCase, replies: list[Reply], verdicts: list[Verdict]) -> Iterable[tuple[str, str]]:
    """(direction, sign) of each draw."""
    failed = [verdict for verdict in verdicts if verdict.failed]
    if any(reply.outcome not in ("answered", "not_in_mesh") for reply in replies):
        yield "forward", "X"
        return
    for draw in range(len(case.values)):
        with one_thread():
            tensors = expected_of(case, draw, replies)[0].tensors
        for direction, claim in CLAIMS.items():
            named = {
                name: each for name, each in tensors.items() if name.startswith("grad.") == (direction == "gradient")
            }
            if not named:
                continue
            if any(verdict.draw == draw and verdict.claim == claim.name for verdict in failed):
                yield direction, "X"
            elif any("refused" in name for name in named):
                yield direction, "R"
            elif any(map(is_too_wide, named.values())):
                yield direction, "?"
            else:
                yield direction, "=" if all(each.allowed is None for each in named.values()) else "~"


def tell(counts: Counter[str]) -> str:
    return " ".join(f"{sign}{counts[sign]}" for sign in "=~?RX" if counts[sign])


def main(num_cases: int, first: int, last: int) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    space = Space(limits.WORLD_SIZES, limits.DTYPES)
    columns = [(direction, kind) for direction in CLAIMS for kind in KINDS]
    print("| operator |", " | ".join(f"{direction}, {kind}" for direction, kind in columns), "|")
    print("|", " --- |" * (1 + len(columns)))
    totals: Counter[tuple[str, str]] = Counter()
    with Pool() as pool:
        for name in list(OPERATORS)[first:last]:
            counts: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
            for case in drawn(operator_cases(space, operators=(name,)), num_cases, number=first):
                replies = pool.run("dtensor_operators", case)
                verdicts = judge_replies("dtensor_operators", case, replies, tuple(CLAIMS.values()))
                for direction, sign in signs_of(case, replies, verdicts):
                    counts[direction, kind_of(case)][sign] += 1
                    totals[direction, sign] += 1
                for verdict in verdicts:
                    if verdict.failed:
                        mismatches = verdict.judgement.mismatches
                        what = mismatches[0] if mismatches else verdict.detail[:300]
                        print(f"  {verdict.claim} {verdict.kind} {case!r} {what}", file=sys.stderr)
            print(f"| {name} |", " | ".join(tell(counts[column]) for column in columns), "|", flush=True)
    for direction in CLAIMS:
        print(f"{direction}: {tell(Counter({sign: totals[direction, sign] for sign in '=~?RX'}))}")


if __name__ == "__main__":
    numbers = [int(text) for text in sys.argv[1:]]
    main(*(numbers + [10, 0, len(OPERATORS)][len(numbers) :]))
