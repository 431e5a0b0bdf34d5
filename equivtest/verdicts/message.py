"""Writes the message of a failure from its `Verdict`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from equivtest.base.lacking import NOT_RUN
from equivtest.base.users_code import users_frames
from equivtest.verdicts.verdict import KINDS, Mismatch, Verdict

MOST_NAMES = 16
MOST_TIMES = 1e9
"""Ratio of error and bound from which the message uses an exponent."""


def write_message(verdict: Verdict, *, replay: str = "") -> str:
    """Describes the failure in full: the wrong tensor, the place, the error, the case, and how to repeat the failure.

    Args:
        replay: Path of the replay file; '' if there is none.
    """
    lines = describe_failure(verdict)
    mode, seed = verdict.case.values[verdict.draw]
    lines.append(f"  {'values':9} {mode}, seed {seed} (draw {verdict.draw})")
    lines.append(f"  {'case':9} {verdict.case!r}")
    if verdict.kind == "timed_out" and NOT_RUN not in verdict.detail:
        way_out = "raise this limit with limit_s of its property, or with equivtest check --limit-s"
        lines.append(f"  {'limit':9} one run of a case may take {verdict.limit_s:g} s: {way_out}")
    if verdict.shrunk_from:
        lines.append(f"  {'at first':9} {verdict.shrunk_from}")
    if verdict.fault:
        lines.append(f"  {'fault':9} {verdict.fault}")
    if verdict.history:
        lines.append(f"  {'history':9} {verdict.history}")
    if replay:
        lines.append(f"  {_again(replay)}")
    return "\n".join(lines)


def write_brief_message(verdict: Verdict, replay: str) -> str:
    """Describes the failure, like `write_message` or in only five lines.

    The five lines are for a user's program that raised the same exception on every rank. They show the innermost line
    of the user's code. They leave out the traceback, which the replay file has.
    """
    first, *others = verdict.detail.splitlines() or [""]
    frames = list(users_frames(others).values())
    way_out = [line for line in others if not line.startswith("  ")]
    is_alike = verdict.kind == "raised" and first.startswith("every rank ")
    if not (is_alike and frames and len(way_out) == 1) or verdict.history:
        return write_message(verdict, replay=replay)
    file, line, name = frames[-1].groups()
    rows = [f"{first}, at {file}:{line} in {name}", *way_out, f"{'case':9} {verdict.case!r}"]
    if verdict.fault and not verdict.fault.startswith("parallelization: "):
        rows.append(f"{'fault':9} {verdict.fault}")
    headline = f"{describe_failure(verdict)[0]} (claim {verdict.claim})"
    return "\n".join([headline, *(f"  {row}" for row in (*rows, _again(replay)))])


def _again(replay: str) -> str:
    return f"{'again':9} equivtest replay {replay}"


def describe_failure(verdict: Verdict) -> list[str]:
    first = next(iter(verdict.judgement.mismatches), None)
    error = KINDS[verdict.kind]
    headline = error.headline.format(tensor=first.tensor if first else "")
    lines = [f"{error.__name__}: {verdict.subject}: {headline}", f"  {'claim':9} {verdict.claim}"]
    if first is not None:
        lines += _describe(first, verdict)
    if verdict.detail:
        lines += ["  " + line for line in verdict.detail.splitlines()]
    return lines


def _describe(mismatch: Mismatch, verdict: Verdict) -> list[str]:
    where = [verdict.case.name_rank(mismatch.rank if mismatch.process is None else mismatch.process)]
    if mismatch.local_index is not None:
        where.append(f"local {mismatch.local_index}")
    if mismatch.global_index is not None:
        where.append(f"global {mismatch.global_index} of {mismatch.global_shape}")
    elif mismatch.global_shape is not None:
        where.append(f"global shape {mismatch.global_shape}")
    where.append(mismatch.layout)
    rows = [("where", ", ".join(part for part in where if part))]
    by_value = verdict.kind == "value" and mismatch.local_index is not None
    rows.append(
        ("expected", mismatch.expected + ("   one process, exact" if by_value and not mismatch.allowed else ""))
    )
    rows.append(("actual", mismatch.actual + (f"   {verdict.case.dtype}" if by_value else "")))
    if by_value:
        rows.append(("error", _error(mismatch)))
    elif verdict.kind == "value":
        rows.append(("error", mismatch.derivation))
    others = [other.tensor for other in verdict.judgement.mismatches[1:] if other.tensor != mismatch.tensor]
    wrong = f"{few(list(dict.fromkeys(others)))} differ too" if others else ""
    right = f"{few(verdict.judgement.agreeing)} agree" if verdict.judgement.agreeing else ""
    rows.append(("extent", "; ".join(part for part in (mismatch.extent, wrong, right) if part)))
    rows += [("pattern", mismatch.pattern), ("way out", mismatch.way_out)]
    return [f"  {label:9} {text}" for label, text in rows if text]


def _error(mismatch: Mismatch) -> str:
    if not mismatch.allowed:
        return f"{mismatch.error:.2g}, allowed 0: {mismatch.derivation}"
    times = mismatch.error / mismatch.allowed
    told = f"{times:,.1f}" if times < MOST_TIMES else f"{times:.1e}"
    return f"{mismatch.error:.2g}, allowed {mismatch.allowed:.2g} ({told} times): {mismatch.derivation}"


def on_factors(factors: Mapping[str, float]) -> list[str]:
    """Returns one line, with the names of tensors, for each factor that the backward applies and removes again."""
    by_factor: dict[float, list[str]] = {}
    for name, factor in factors.items():
        by_factor.setdefault(factor, []).append(name)
    return [f"{factor:g} in the backward, divided out later: {few(names)}" for factor, names in by_factor.items()]


def few(names: Sequence[str]) -> str:
    others = f" and {len(names) - MOST_NAMES} others" if len(names) > MOST_NAMES else ""
    return ", ".join(names[:MOST_NAMES]) + others
