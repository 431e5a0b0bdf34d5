"""Judges each operator of DTensors, in a sweep that can be interrupted, continued and shared, and prints a table.

    python -m studies.operator_coverage FILE [--strength 1] [--cases 0] [--seed 0] [--shard 1/2] [OPERATOR ...]
    python -m studies.operator_coverage FILE [FILE ...] --table

The first command adds one line of JSON per operator to FILE, except for operators that FILE already has.  It prints an
unknown failure as soon as it occurs.  The second command prints the results of all files together.  For each operator
it counts draws, forward and in the gradient: equal (`=`), within a bound (`~`), inconclusive (`?`), refused on every
rank alike (`R`), failed as is known (`K`) or failed (`X`).  It also prints why the other operators of torch's list are
left out.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from packaging.version import Version

from equivtest.base import limits
from equivtest.errors import Misuse
from equivtest.families.operators.case import OperatorCase
from equivtest.families.operators.case_samples import LEFT_OUT
from equivtest.families.operators.case_table import OPERATORS, results_of
from equivtest.families.operators.oracle import text_of
from equivtest.families.operators.strategy import operator_cases
from equivtest.families.operators.strategy_calls import calls_of_operator
from equivtest.families.operators.strategy_forms import forms_of
from equivtest.property import Space
from equivtest.ranks.pool import Pool
from equivtest.ranks.reply import Reply
from equivtest.search.known import SHIPPED, KnownFailures
from equivtest.verdicts.claims import agrees_on_all_ranks, equals_unsharded, gradients_equal_unsharded
from equivtest.verdicts.elements import is_too_wide
from equivtest.verdicts.judging import expected_of, judge_replies, one_thread
from equivtest.verdicts.verdict import Verdict
from studies.json_lines import lines_of
from tests.drawing import drawn

DIRECTIONS = ("forward", "gradient")
CLAIMS = {"forward": equals_unsharded, "gradient": gradients_equal_unsharded}
KINDS = ("replicate", "shard", "partial")
LOUD = {"raised": "raises", "timed_out": "hangs", "lost": "ends its process", "not_supported": "not supported"}
"""Kind of a verdict on a whole run -> what the operator does."""
KNOWN = KnownFailures.load(SHIPPED)
SUBJECT = "dtensor_operators"

Signs = Iterator[tuple[str, str, str]]


def kind_of(case: OperatorCase) -> str:
    """Returns 'partial', 'shard' or 'replicate': the first of these that some operand has."""
    texts = [text for placements in case.placements for text in placements]
    return next((kind for kind in ("partial", "shard") if any(text.startswith(kind) for text in texts)), "replicate")


def is_known(verdict: Verdict) -> bool:
    return bool(KNOWN.match(verdict.subject, verdict.claim, verdict.case, verdict.kind))


def signs_of(case: OperatorCase, replies: list[Reply], verdicts: list[Verdict]) -> Signs:
    """Yields (direction, sign, reason) for each draw.  The docstring of the module lists the signs."""
    failed = [verdict for verdict in verdicts if verdict.failed]
    worst = "X" if any(not is_known(verdict) for verdict in failed) else "K"
    if any(reply.outcome not in ("answered", "not_in_mesh") for reply in replies):
        yield "forward", worst, ""
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
            reason = next((each.derivation for each in named.values() if is_too_wide(each)), "")
            if any(verdict.draw == draw and verdict.claim == claim.name for verdict in failed):
                yield direction, worst, ""
            elif any("refused" in name for name in named):
                refusals = [bytes(each.value.to(torch.uint8).tolist()) for name, each in named.items() if "ref" in name]
                yield direction, "R", text_of(torch.tensor(list(refusals[0])))
            elif reason:
                yield direction, "?", reason
            else:
                yield direction, "=" if all(each.allowed is None for each in named.values()) else "~", ""


def outcome_of(verdicts: list[Verdict], signs: set[tuple[str, str]]) -> tuple[str, str]:
    """Returns the outcome of a case, and its wrong tensor or a message.

    An outcome of the forward comes before an outcome of the gradient. "holds" is every outcome that is neither wrong
    nor refused, including inconclusive outcomes.  A failure counts even if it is known, because another release may be
    right.

    Args:
        signs: (direction, sign) of the case's draws.
    """
    for verdict in verdicts:
        if verdict.kind in LOUD:
            return LOUD[verdict.kind], verdict.detail.partition("\n")[0]
    wrong = [verdict for verdict in verdicts if verdict.failed]
    for verdict in sorted(wrong, key=lambda each: each.claim == gradients_equal_unsharded.name):
        what = "wrong gradient" if verdict.claim == gradients_equal_unsharded.name else "wrong"
        return what, f"{verdict.kind}: {verdict.judgement.mismatches[:1]}"
    if ("forward", "R") in signs:
        return "refused", ""
    if ("gradient", "R") in signs:
        return "gradient refused", ""
    return "holds", ""


def cases_of(name: str, strength: int, num_cases: int, seed: int) -> list[OperatorCase]:
    """Returns the enumerated calls of an operator on two ranks, and `num_cases` drawn cases on all world sizes."""
    space = Space(limits.WORLD_SIZES, limits.DTYPES)
    further = drawn(operator_cases(space, operators=(name,)), num_cases, number=seed) if num_cases else []
    return [*calls_of_operator(name, 2, "float32", strength), *further]


def judged(name: str, strength: int, num_cases: int, seed: int, pool: Pool) -> dict[str, Any]:
    begun_s, counts, reasons, failures = time.monotonic(), Counter[str](), defaultdict[str, Counter[str]](Counter), []
    verdicts_of: Counter[str] = Counter()
    outcomes: dict[str, tuple[str, str]] = {}
    for case, replies in pool.run_all(SUBJECT, cases_of(name, strength, num_cases, seed)):
        verdicts = judge_replies(SUBJECT, case, replies, (*CLAIMS.values(), agrees_on_all_ranks))
        verdicts_of.update(verdict.kind for verdict in verdicts)
        signs = list(signs_of(case, replies, verdicts))
        for direction, sign, reason in signs:
            counts[f"{direction} {kind_of(case)} {sign}"] += 1
            if sign in "?R":
                reasons[f"{direction} {sign}"][reason[:160]] += 1
        outcomes[repr(case)] = outcome_of(verdicts, {(direction, sign) for direction, sign, _ in signs})
        for verdict in verdicts:
            if verdict.failed and not is_known(verdict):
                mismatches = verdict.judgement.mismatches
                what = mismatches[0] if mismatches else verdict.detail[:300]
                failures.append(f"{verdict.claim} {verdict.kind} {case!r} {what}")
                print(f"  {failures[-1]}", file=sys.stderr, flush=True)
    return {
        "torch": Version(torch.__version__).public,
        "operator": name,
        "seed": seed,
        "cases": num_cases,
        "seconds": round(time.monotonic() - begun_s, 1),
        "counts": counts,
        "verdicts": verdicts_of,
        "reasons": {key: dict(texts.most_common(3)) for key, texts in reasons.items()},
        "failures": failures,
        "outcomes": outcomes,
    }


def sweep(file: Path, names: Iterable[str], strength: int, num_cases: int, seed: int) -> None:
    """Judges the operators that the file lacks for this seed, and adds their lines.  Prints refused operators."""
    done = {(line["operator"], line["seed"]) for line in lines_of(file)} if file.exists() else set()
    with Pool() as pool, file.open("a", encoding="utf-8") as out:
        for name in names:
            if (name, seed) not in done:
                try:
                    line = judged(name, strength, num_cases, seed, pool)
                except Misuse as error:
                    print(f"  {error}", file=sys.stderr, flush=True)
                    continue
                out.write(json.dumps(line) + "\n")
                out.flush()


def has_gradient(name: str) -> bool:
    return any(
        result.operands
        for form in forms_of(name)
        for result in results_of(name, form.shapes, form.arguments, ("float32",) * len(form.shapes), form.holds)
    )


def table(lines: list[dict[str, Any]]) -> Iterator[str]:
    """Yields a row per operator, including operators that are left out, and the number of judged operators."""
    counts: dict[str, Counter[tuple[str, str]]] = defaultdict(Counter)
    reasons: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    for line in lines:
        for key, num in line["counts"].items():
            direction, _, sign = key.split(" ")
            counts[line["operator"]][direction, sign] += num
        for key, texts in line["reasons"].items():
            reasons[line["operator"], key.split(" ")[0]].update(texts)
    yield "| operator | forward | gradient |"
    yield "| --- | --- | --- |"
    kept: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name in OPERATORS:
        cells = [name]
        for direction in DIRECTIONS:
            signs = {sign: counts[name][direction, sign] for sign in "=~?RKX"}
            if direction == "gradient" and not has_gradient(name):
                cells.append("none")
                continue
            cells.append(" ".join(f"{sign}{num}" for sign, num in signs.items() if num))
            [(reason, _)] = reasons[name, direction].most_common(1) or [("no call", 0)]
            kept[direction, fate_of(signs)].append(f"`{name}`: {reason}")
        yield f"| {' | '.join(cells)} |"
    yield from (f"| {name} | left out: {reason} | |" for name, reason in LEFT_OUT.items())
    for direction in DIRECTIONS:
        num = {fate: len(kept[direction, fate]) for fate in FATES}
        yield f"{direction}: {', '.join(f'{num[fate]} {fate}' for fate in FATES)}; {len(LEFT_OUT)} left out"
        for fate in FATES[1:]:
            yield from (f"- {fate}: {text}" for text in kept[direction, fate])
    num_verdicts, num_failures = (
        sum(num for line in lines for num in line["verdicts"].values()),
        sum(len(line["failures"]) for line in lines),
    )
    yield f"{num_verdicts} verdicts, {num_failures} fail"


FATES = ("judged", "refused by torch", "undecided")


def fate_of(signs: dict[str, int]) -> str:
    return FATES[0] if any(signs[sign] for sign in "=~KX") else FATES[1] if signs["R"] else FATES[2]


def main(texts: list[str]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="+", metavar="FILE or OPERATOR")
    parser.add_argument("--strength", type=int, default=1)
    parser.add_argument("--cases", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--shard", default="1/1")
    parser.add_argument("--table", action="store_true")
    given = parser.parse_intermixed_args(texts)
    warnings.simplefilter("ignore")
    if given.table:
        print("\n".join(table(lines_of(*map(Path, given.names)))))
        return
    torch.set_num_threads(1)
    number, num = map(int, given.shard.split("/"))
    names = given.names[1:] or list(OPERATORS)[number - 1 :: num]
    sweep(Path(given.names[0]), names, given.strength, given.cases, given.seed)


if __name__ == "__main__":
    main(sys.argv[1:])
