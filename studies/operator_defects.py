"""Measures which wrong rules of DTensor are found, in which smallest case, and how soon, beside torch's own validation.

python -m studies.operator_defects [--beside | --gate] [NAME ...]

`time` is the search's time until a claim rejects the defect, `smallest` is the case after shrinking.  With --beside,
torch's `strategy_validation` checks the same operator with the same rule planted.  It is red if it finds more wrong
rules than without the planted rule.  With --gate only a gate's drawn and enumerated cases are run.

Source: torch.distributed.tensor._ops.strategy_validation.compare_operator (2.13.0), on samples of torch's own list.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import sys
import time
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist

from equivtest.base import limits
from equivtest.base.profiles import PROFILES
from equivtest.families.operators.case import OperatorCase
from equivtest.families.operators.strategy import operator_cases
from equivtest.families.operators.strategy_calls import calls_of_operator
from equivtest.property import Property, Space
from equivtest.pytest_plugin.suite import shipped
from equivtest.ranks.pool import Pool
from equivtest.search.chunks import Chunk, draw_cases
from equivtest.search.known import KnownFailures
from equivtest.search.search import search
from equivtest.verdicts.judging import judge
from tests.drawing import drawn
from tests.gate import known_in
from tests.planted.rules import WRONG, WrongRule, planted

DTYPES = ("float32", "float64")
MAX_CASES = 200


def property_of(name: str) -> Property:
    """Returns the shipped property about operators, with the defect as its subject and only the defect's operator."""
    one = (WRONG[name].operator,)
    return replace(
        shipped()["dtensor_operators"],
        subject=f"tests.planted.rules:{name}",
        cases=lambda space: operator_cases(space, operators=one),
    )


def known_of(name: str) -> KnownFailures:
    return known_in("dtensor_operators", f"tests.planted.rules:{name}")


def found(name: str, pool: Pool) -> tuple[str, float, int]:
    """Returns (rejecting claim and kind, seconds until the rejection, number of cases until then)."""
    prop, known, begun_s = property_of(name), known_of(name), time.monotonic()
    space = Space((WRONG[name].world_size,), DTYPES)
    for number, case in enumerate(drawn(prop.cases(space), MAX_CASES), 1):
        for verdict in judge(prop.subject, case, pool, prop.claims):
            if verdict.failed and not known.match(verdict.subject, verdict.claim, verdict.case, verdict.kind):
                return f"{verdict.claim} {verdict.kind}", time.monotonic() - begun_s, number
    return "GREEN", time.monotonic() - begun_s, MAX_CASES


def gate_cases(name: str) -> tuple[list[OperatorCase], list[OperatorCase]]:
    prop, operator = shipped()["dtensor_operators"], WRONG[name].operator
    chunks = [Chunk(size, limits.DTYPES, 0, prop.weight * PROFILES["gate"].several) for size in (2, 3, 4)]
    random = [case for chunk in chunks for case in draw_cases(prop, chunk, chunk.num_cases)]
    assert all(isinstance(case, OperatorCase) for case in random)
    of_operator = [case for case in random if case.operator == operator]  # type: ignore[attr-defined]
    return of_operator, list(calls_of_operator(operator, 2, "float32", 1))  # type: ignore[return-value]


def killed(name: str, cases: Iterable[OperatorCase], pool: Pool) -> str:
    """Returns the claim and kind by which one of the cases rejects the defect, or ''."""
    subject, known = f"tests.planted.rules:{name}", known_of(name)
    for case in cases:
        for verdict in judge(subject, case, pool, shipped()["dtensor_operators"].claims):
            if verdict.failed and not known.match(verdict.subject, verdict.claim, verdict.case, verdict.kind):
                return f"{verdict.claim} {verdict.kind}"
    return ""


def gate_rows(names: list[str]) -> Iterator[str]:
    """Yields a table with a row for each defect: how many of a gate's cases of the defect's operator reject it."""
    yield "| defect | operator | random cases | reject it | enumerated calls | reject it |"
    yield "|" + " --- |" * 6
    with Pool() as pool:
        for name in names:
            random, calls = gate_cases(name)
            cells = (name, WRONG[name].operator, len(random), killed(name, random, pool) or "GREEN", len(calls))
            yield f"| {' | '.join(map(str, cells))} | {killed(name, calls, pool) or 'GREEN'} |"


def smallest(name: str, target: tuple[str, str], pool: Pool) -> str:
    with TemporaryDirectory() as folder:
        for index in range(3):
            chunk = Chunk(WRONG[name].world_size, DTYPES, index, MAX_CASES)
            findings = search(property_of(name), chunk, pool, known_of(name), Path(folder), only=target)
            if findings.failures:
                return str(findings.failures[0].case)
    return "?"


def validated(wrong: WrongRule) -> str:
    """Returns how many rules torch's own validation finds wrong, with and without the planted rule."""
    import torch.testing._internal.common_methods_invocations as common_ops
    from torch.distributed.tensor._ops import strategy_validation as validation
    from torch.testing._internal.opinfo import core as opinfo_core

    if not dist.is_initialized():  # two ranks that it simulates, as its command does, and samples that they divide
        dist.init_process_group("fake", rank=0, world_size=2)
        for module in (opinfo_core, common_ops):
            module.L, module.M, module.S, module.XS = 24, 12, 4, 2

    def count() -> Any:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            stats = validation.compare_operator(
                wrong.listed or wrong.operator.partition(" ")[0], max_samples=12, incorrect_only=True
            )
        return len(stats.false_positives) if stats.total_samples else None

    try:
        without = count()
        with planted(wrong):
            beside = count()
    except Exception as error:
        return f"raises {type(error).__name__}"
    if without is None:
        return "not asked"
    return f"{'red' if beside > without else 'green'} ({without} -> {beside})"


def rows(names: list[str], *, beside: bool) -> Iterator[str]:
    yield "| defect | what is wrong | operator | rejected by | cases | seconds | smallest case | torch's validation |"
    yield "|" + " --- |" * 8
    with Pool() as pool:
        for name in names:
            wrong = WRONG[name]
            how, seconds, num = found(name, pool)
            case = "" if how == "GREEN" else smallest(name, tuple(how.split(" ")), pool)  # type: ignore[arg-type]
            torch_says = validated(wrong) if beside else ""
            cells = (name, wrong.kind, wrong.operator, how, str(num), f"{seconds:.1f}", f"`{case}`", torch_says)
            yield f"| {' | '.join(cells)} |"


def main(texts: list[str]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*")
    parser.add_argument("--beside", action="store_true")
    parser.add_argument("--gate", action="store_true")
    given = parser.parse_args(texts)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    lines = []
    names = given.names or list(WRONG)
    for line in gate_rows(names) if given.gate else rows(names, beside=given.beside):
        print(line, flush=True)
        lines.append(line)
    num_red = sum(not line.endswith("| GREEN |") and "| GREEN | 200 |" not in line for line in lines[2:])
    print(f"{num_red} of {len(lines) - 2} are red")


if __name__ == "__main__":
    main(sys.argv[1:])
