"""Runs some cases of a bundle again and compares the verdicts, so that invented verdicts are found.

The bundle's digest and a seed choose the cases.  The maker of the bundle could not know the seed.
"""

from __future__ import annotations

import random
import secrets
from collections.abc import Callable, Iterator

from equivtest.bundle.contents import Environment
from equivtest.bundle.derive import key_of
from equivtest.bundle.verify import Verified
from equivtest.cases.case import from_data
from equivtest.property import Property
from equivtest.ranks.pool import Pool
from equivtest.report.handover import TORCHS, Record
from equivtest.search.chunks import Chunk
from equivtest.search.known import KnownFailures
from equivtest.search.search import Searching

Recorded = tuple[Property, Chunk, list[Record]]
"""(property, search, records of one case)."""


def rerun_cases(
    found: Verified, pool: Pool, number: int, cpu: str, seed: str = "", gloo: Callable[[], Pool] | None = None
) -> Iterator[tuple[str, bool]]:
    """Runs cases of a bundle again.  Yields (line, True if the line names a difference).

    Args:
        number: Number of cases to run. If the bundle has fewer cases, all of them run.
        cpu: Name of this machine's CPU. If the bundle's run had a CPU of the same name, the margins have to be equal.
        seed: Text that determines the choice of cases. If '', the choice is random.
        gloo: See `equivtest.search.search.search`.

    Raises:
        BrokenSetup: ranks cannot start.
    """
    if found.environment is None:
        yield "note: no case ran again, because the checks of the bundle failed", False
        return
    seed = seed or secrets.token_hex(8)
    chosen = chosen_cases(found, number, seed)
    same = _is_same_machine(found.environment, pool, cpu)
    num_differing = 0
    for prop, chunk, records in chosen:
        searching = Searching(prop, chunk, pool, found.known, gloo=gloo)
        case = from_data(records[0].case)
        searching.judge_cases([case])
        wanted = key_of(records[0].case)
        again = [record for record in searching.records if key_of(record.case) == wanted]
        lines = list(_differences(records, again, same=same))
        num_differing += bool(lines)
        for line in lines:
            yield f"rerun: {prop.subject}: {line} in {case!r}", True
    how = "verdicts and margins" if same else "verdicts, and which tensors have margins"
    yield (
        (
            f"rerun: {len(chosen) - num_differing} of {len(chosen)} cases agree on {pool.backend.name} and "
            f"{pool.backend.device}, in {how}; --seed {seed} chooses the same cases again"
        ),
        False,
    )
    if not chosen:
        yield "rerun: no case of the bundle can run again", True


def chosen_cases(found: Verified, number: int, seed: str) -> list[Recorded]:
    """Returns `number` cases, chosen by the bundle's digest and `seed` among all cases that may run."""
    cases = [each for search in found.searches for each in _cases_of(*search) if not _is_barred(each, found.known)]
    return random.Random(f"{found.digest} {seed}").sample(cases, min(number, len(cases)))


def _cases_of(prop: Property, chunk: Chunk, records: list[Record]) -> Iterator[Recorded]:
    by_case: dict[bytes, list[Record]] = {}
    for record in records:
        by_case.setdefault(key_of(record.case), []).append(record)
    yield from ((prop, chunk, each) for each in by_case.values())


def _is_barred(recorded: Recorded, known: KnownFailures) -> bool:
    prop, _, records = recorded
    return known.forbids_run(prop.subject, from_data(records[0].case)) is not None


def _is_same_machine(environment: Environment, pool: Pool, cpu: str) -> bool:
    here = (pool.backend.name, pool.backend.device, pool.backend.arithmetic)
    arithmetic = environment.arithmetic if environment.declared is not None else ""
    return (environment.backend, environment.device, arithmetic) == here and environment.cpu == cpu


def _differences(records: list[Record], again: list[Record], *, same: bool) -> Iterator[str]:
    if len(records) != len(again):
        yield f"the bundle has {len(records)} verdicts, but this run {len(again)}"
        return
    for recorded, here in zip(records, again, strict=True):
        for claim in sorted(recorded.verdicts.keys() | here.verdicts.keys()):
            pair = recorded.verdicts.get(claim, "none"), here.verdicts.get(claim, "none")
            if recorded.known.get(claim) == f"{TORCHS} ({pair[1]})":
                continue  # a failure that the run left to torch, and that shows here too
            if pair[0] != pair[1] and (same or set(pair) != {"holds", "inconclusive"}):
                yield f"the verdict on {claim} is {pair[0]!r} in the bundle, but {pair[1]!r} here"
        if set(recorded.verdicts.values()) == set(here.verdicts.values()) == {"holds"}:
            yield from _differing_margins(recorded, here, same=same)


def _differing_margins(recorded: Record, here: Record, *, same: bool) -> Iterator[str]:
    if recorded.tensor_margins.keys() != here.tensor_margins.keys():
        names = ", ".join(sorted(recorded.tensor_margins.keys() ^ here.tensor_margins.keys()))
        yield f"only the bundle or only this run has margins of {names}"
        return
    for name, margin in recorded.tensor_margins.items():
        if same and margin != here.tensor_margins[name]:
            yield f"the margin of {name} is {margin:.6g} in the bundle, but {here.tensor_margins[name]:.6g} here"
