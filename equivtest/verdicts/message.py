"""The message of a failure, made from its `Verdict` alone."""

from __future__ import annotations

from equivtest.verdicts.verdict import Kind, Mismatch, Verdict

HEADLINES: dict[Kind, str] = {
    "value": "ValueMismatch: {subject}: {tensor} differs from the oracle",
    "layout": "LayoutMismatch: {subject}: {tensor} has another layout than its contract",
    "shape": "ShapeMismatch: {subject}: {tensor} has another shape or dtype than the oracle's",
    "replica": "ReplicaMismatch: {subject}: {tensor} differs between ranks that hold the same",
    "touched": "InputTouched: {subject}: {tensor} is not as it was handed out",
    "bits": "BitsMismatch: {subject}: {tensor} has not the bits of the unsharded computation",
    "repeat": "RepeatMismatch: {subject}: {tensor} is not the same when the case runs again",
    "ways": "WaysMismatch: {subject}: {tensor} is not what the other way gives",
    "chance": "ChanceMismatch: {subject}: {tensor} is not as chance has it",
    "collectives": "CollectiveMismatch: {subject}: other collectives than the documented ones",
    "not_refused": "NotRefused: {subject}: a case outside the contract was not refused alike",
    "raised": "RankRaised: {subject}: a rank raised",
    "lost": "RankLost: {subject}: a rank's process ended",
    "timed_out": "RankTimedOut: {subject}: a rank did not answer",
    "not_supported": "NotSupported: {subject}: the backend cannot do what the case needs",
}


def write_message(verdict: Verdict, *, replay: str = "") -> str:
    """The failure in full: what, where, by how much, in which case, and how to see it again.

    Args:
        replay: Path of the replay file; left out where there is none.
    """
    first = verdict.mismatches[0] if verdict.mismatches else None
    lines = [HEADLINES[verdict.kind].format(subject=verdict.subject, tensor=first.tensor if first else "")]
    lines += [f"  {'claim':9} {verdict.claim}"]
    if first is not None:
        lines += _describe(first, verdict)
    if verdict.detail:
        lines += ["  " + line for line in verdict.detail.splitlines()]
    mode, seed = verdict.case.values[verdict.draw]
    lines.append(f"  {'values':9} {mode}, seed {seed} (draw {verdict.draw})")
    lines.append(f"  {'case':9} {verdict.case!r}")
    if verdict.history:
        lines.append(f"  {'history':9} {verdict.history}")
    if replay:
        lines.append(f"  {'again':9} equivtest replay {replay}")
    return "\n".join(lines)


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
    others = [other.tensor for other in verdict.mismatches[1:] if other.tensor != mismatch.tensor]
    wrong = f"{', '.join(dict.fromkeys(others))} differ too" if others else ""
    right = f"{', '.join(verdict.agreeing)} agree" if verdict.agreeing else ""
    rows.append(("extent", "; ".join(part for part in (mismatch.extent, wrong, right) if part)))
    rows.append(("pattern", mismatch.pattern))
    return [f"  {label:9} {text}" for label, text in rows if text]


def _error(mismatch: Mismatch) -> str:
    if not mismatch.allowed:
        return f"{mismatch.error:.2g}, allowed 0: {mismatch.derivation}"
    times = mismatch.error / mismatch.allowed
    return f"{mismatch.error:.2g}, allowed {mismatch.allowed:.2g} ({times:,.1f} times): {mismatch.derivation}"
