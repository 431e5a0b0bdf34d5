"""`equivtest.check`: judges a program immediately, in a script, at a prompt, or in any test."""

from __future__ import annotations

import inspect
import itertools
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Never

from equivtest.base import limits
from equivtest.base.functions import Named, is_rank
from equivtest.base.importing import suggestion
from equivtest.base.profiles import PROFILES, plan
from equivtest.cases.picks import builder_of
from equivtest.errors import BrokenSetup, EquivtestError, Inconclusive, Misuse
from equivtest.programs import property as properties
from equivtest.programs.groups import Judge, Training, World, complete, refuse_unknown
from equivtest.property import Property
from equivtest.ranks.backend import Backend
from equivtest.ranks.pool import Pool
from equivtest.report.folder import FAILURES
from equivtest.report.handover import Failure, Listed
from equivtest.report.tally import Tally
from equivtest.search.audit import audit as audit_property
from equivtest.search.chunks import chunk_of
from equivtest.search.known import SHIPPED, KnownFailures
from equivtest.search.search import search
from equivtest.verdicts.judging import one_thread

if TYPE_CHECKING:
    from equivtest.cases.case import Shape
    from equivtest.programs.inputs import Input

ARGUMENTS = ("inputs", "sizes", "positional", "batch", "options", "training", "world", "judge")
SETTINGS = ("world_sizes", "dtypes", "profile", "audit", "backend", "raises")

WORDS = {"passed": "holds", "failed": "fails", "skipped": "open", "xfailed": "known failure"}
"""Outcomes of claims -> the words of a result."""

_counts = itertools.count()
_pools: dict[Backend, Pool] = {}
"""The pool of each backend, kept until the process ends: a new pool takes seconds to import torch."""

_imported: dict[tuple[str, str], tuple[int, object]] = {}
"""(file, name of a function) -> when the file was last changed, and the function, at the last check."""


class CheckFailed(EquivtestError, AssertionError):
    """Raised if a claim of a program does not hold.

    Attributes:
        result: The `Result` of the whole check, which also has the claims that hold.
    """

    def __init__(self, result: Result) -> None:
        super().__init__(str(result))
        self.result = result


@dataclass(frozen=True, repr=False)
class Result:
    """The result of a check.

    The result is true if no claim fails and some claim holds, so that `assert equivtest.check(...)` is a test.

    Attributes:
        claims: Claim -> 'holds', 'fails', 'known failure', or 'open' if there is no conclusion on the claim.
        failures: The smallest failure of each claim and kind. The field `message` of a failure has its whole text.
        cases: Number of cases that were judged.
        notes: One line for everything that was left open or left out.
    """

    claims: Mapping[str, str]
    failures: tuple[Failure, ...]
    cases: int
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """True if no claim fails and some claim holds."""
        words = list(self.claims.values())
        return "fails" not in words and "holds" in words

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        if self.failures:
            return "\n\n".join(failure.message for failure in self.failures)
        by_word = {word: [name for name, each in self.claims.items() if each == word] for word in WORDS.values()}
        lines = [f"{word}: {', '.join(names)}" for word, names in by_word.items() if names]
        return "\n".join([f"{self.cases} cases", *lines, *self.notes])

    __repr__ = __str__


def check(
    build: Named,
    parallelize: Named,
    inputs: Mapping[str, Input] | Sequence[Shape] | None = None,
    *,
    sizes: Mapping[str, Sequence[int]] | None = None,
    positional: Sequence[str] = (),
    batch: str | None = None,
    options: Mapping[str, Sequence[Any]] | None = None,
    training: Training | None = None,
    world: World | None = None,
    judge: Judge | None = None,
    world_sizes: Sequence[int] | None = None,
    dtypes: Sequence[str] | None = None,
    profile: str = "smoke",
    audit: bool = True,
    backend: Backend | None = None,
    raises: bool = False,
    **unknown: Never,
) -> Result:
    """Judges a program immediately, as `equivtest run` judges a property.

        result = equivtest.check(block, tensor_parallel, inputs=[(1, 3), (4, 3)])
        print(result.ok, result)

    If the functions are in your script, call `check` below `if __name__ == "__main__":` or in a function, because ranks
    import the script.

    Args:
        build, parallelize, inputs, sizes, positional, batch, options, training, world, judge: Same as in `program`.
        world_sizes: Numbers of ranks. By default, the numbers from 1 to 4 without the numbers that `world` leaves out.
        dtypes: Names of dtypes. By default, float32, float64, bfloat16 and float16.
        profile: Determines how many cases are drawn: few for 'smoke', more for 'gate', and most for 'conformance'.
        audit: True if a few cases also run with spoiled collectives, which the claims must reject.
        backend: The backend and device of the ranks. By default, gloo on the CPU.
        raises: True to raise an error if a claim fails, or if there is no conclusion.

    Returns:
        The result. Its text has the message of each failure.

    Raises:
        CheckFailed: A claim fails, and `raises` is True.
        Inconclusive: There is no conclusion, and `raises` is True.
        Misuse: An argument is wrong, or the program cannot be judged.
        BrokenSetup: No rank can run here, or the backend is wrong.
    """
    refuse_unknown("check", list(unknown), (*ARGUMENTS, *SETTINGS))
    _refuse_in_rank()
    _require_fresh((build, parallelize))
    groups = complete(training, world, judge)
    prop = properties.make_property(Property, build, parallelize, inputs, sizes, positional, batch, options, *groups)
    return check_property(
        prop, world_sizes=world_sizes, dtypes=dtypes, profile=profile, audit=audit, backend=backend, raises=raises
    )


@dataclass(frozen=True)
class ProgramProperty(Property):
    """A property of a program. pytest collects it, and the method `check` judges it at once."""

    def check(
        self,
        *,
        world_sizes: Sequence[int] | None = None,
        dtypes: Sequence[str] | None = None,
        profile: str = "smoke",
        audit: bool = True,
        backend: Backend | None = None,
        raises: bool = False,
    ) -> Result:
        """Judges the property at once. Arguments, result and errors are the same as in `equivtest.check`."""
        return check_property(
            self, world_sizes=world_sizes, dtypes=dtypes, profile=profile, audit=audit, backend=backend, raises=raises
        )


def check_property(
    prop: Property,
    *,
    world_sizes: Sequence[int] | None = None,
    dtypes: Sequence[str] | None = None,
    profile: str = "smoke",
    audit: bool = True,
    backend: Backend | None = None,
    raises: bool = False,
) -> Result:
    """Judges a property at once. Arguments, result and errors are the same as in `check`."""
    _refuse_in_rank()
    sizes = _world_sizes(prop, world_sizes)
    chosen = _known_names("dtypes", dtypes, limits.DTYPES)
    _known_names("profile", (profile,), [name for name, each in PROFILES.items() if not each.repeats and each.several])
    _forget_programs()
    with one_thread():
        result = _judged(prop, _pool_of(backend or Backend()), sizes, chosen, profile, is_audited=audit)
    if raises and not result.ok:
        raise CheckFailed(result) if "fails" in result.claims.values() else Inconclusive(str(result))
    return result


def _judged(
    prop: Property, pool: Pool, sizes: tuple[int, ...], dtypes: tuple[str, ...], profile: str, *, is_audited: bool
) -> Result:
    known = KnownFailures.load(SHIPPED)
    parts = plan(PROFILES[profile], sizes, prop.weight, has_tables=builder_of(prop.cases) is not None)
    tally = Tally(_listed(prop, [part.label for part in parts]))
    for part in parts:
        chunk = chunk_of(part, dtypes, "gate", sizes, is_limited=pool.backend.device != "cpu")
        findings = search(prop, chunk, pool, known, Path(".equivtest") / FAILURES)
        if findings.misuse:
            raise Misuse(findings.misuse)
        tally.add(part.label, findings.records, findings.failures)
        tally.left_out.update(findings.left_out)
    if is_audited and max(sizes) > 1 and not tally.has_failed:
        audited = audit_property(prop, pool, known, sizes, dtypes).as_data("check")
        tally.unshown = audited.problem or ("not audited" if audited.waits else "")
    if faults := [fault for fault in pool.take_faults() if known.of_fault(fault) is None]:
        raise BrokenSetup(f"the backend is wrong, so nothing was shown: {faults[0]}")
    if deaths := pool.take_deaths():
        raise BrokenSetup(f"a rank died between two cases, so nothing was shown: {deaths[0]}")
    return _result(tally)


def _result(tally: Tally) -> Result:
    claims = tally.claims()
    reasons = dict.fromkeys(each.text for each in claims if each.outcome in ("skipped", "xfailed"))
    notes = [f"{', '.join(each.claim for each in claims if each.text == reason)}: {reason}" for reason in reasons]
    notes += tally.left_out_in_words()
    num = tally.declined.total()
    notes += [f"the program does not support {num} cases: {tally.why_declined}"] if num else []
    words = {each.claim: WORDS[each.outcome] for each in claims}
    return Result(words, tuple(tally.failures), tally.layouts, tuple(notes))


def _listed(prop: Property, planned: Sequence[str]) -> Listed:
    return Listed(
        path="",
        name="check",
        subject=prop.subject,
        statement=prop.statement,
        source=prop.source,
        claims=tuple(claim.name for claim in prop.claims),
        shards=prop.shards,
        planned=tuple(planned),
    )


def _world_sizes(prop: Property, wanted: Sequence[int] | None) -> tuple[int, ...]:
    sizes = limits.WORLD_SIZES if wanted is None else wanted
    most = limits.MAX_WORLD_SIZE
    if not isinstance(sizes, Sequence) or not sizes or not all(_is_size(size, most) for size in sizes):
        raise Misuse(f"world_sizes must be numbers of ranks, 1 to {most}, such as (1, 2), got {wanted!r}")
    found = tuple(sorted(prop.among(set(sizes))))
    if not found:
        raise Misuse(
            f"the program runs only on {prop.world_sizes} ranks, but world_sizes={tuple(sizes)} names none of these"
        )
    return found


def _is_size(size: object, most: int) -> bool:
    return isinstance(size, int) and not isinstance(size, bool) and 1 <= size <= most


def _known_names(what: str, wanted: Sequence[str] | None, known: Sequence[str]) -> tuple[str, ...]:
    if wanted is None:
        return tuple(known)
    if isinstance(wanted, str) or not wanted:
        raise Misuse(f"{what} must hold names, such as ({known[0]!r},), got {wanted!r}")
    unknown = next((name for name in wanted if name not in known), None)
    if unknown is not None:
        raise Misuse(f"{what}: there is no {unknown!r}: {suggestion(str(unknown), list(known))}")
    return tuple(wanted)


def _pool_of(backend: Backend) -> Pool:
    """Returns the backend's pool. The pool's ranks are new, so they import the current files."""
    pool = _pools.get(backend)
    if pool is None:
        pool = _pools[backend] = Pool(backend)
    pool.serve(f"check {next(_counts)}")
    return pool


def _refuse_in_rank() -> None:
    if is_rank():
        raise Misuse(
            "a rank imports your file for its functions, and the file calls equivtest.check at its top level: put that "
            "below if __name__ == '__main__':, or into a test"
        )


def _require_fresh(functions: Sequence[object]) -> None:
    """Raises Misuse if a file was edited after its import, because ranks would import other code than the reference."""
    for function in functions:
        file = _file_of(function)
        if not file:
            continue
        key, changed = (file, getattr(function, "__qualname__", "")), os.stat(file).st_mtime_ns
        before_ns, before = _imported.get(key, (changed, None))
        if before is function and before_ns != changed:
            name = getattr(function, "__module__", "")
            raise Misuse(
                f"{file} has changed since it was imported: call importlib.reload({name}) and pass the reloaded "
                "functions"
            )
        _imported[key] = (changed, function)


def _file_of(function: object) -> str:
    module = sys.modules.get(getattr(function, "__module__", ""))
    file = getattr(module, "__file__", None) or ""
    return file if callable(function) and not inspect.isbuiltin(function) and os.path.isfile(file) else ""


def _forget_programs() -> None:
    """Forgets the cached facts of programs.

    The keys of the caches are the names of programs. At a prompt, you may have changed a program's file and imported it
    again.
    """
    for name, module in list(sys.modules.items()):
        if name.startswith("equivtest.programs."):
            for value in list(vars(module).values()):
                clear: Callable[[], None] | None = getattr(value, "cache_clear", None)
                if clear is not None and getattr(value, "__module__", "").startswith("equivtest."):
                    clear()
    properties.forget_batches()
