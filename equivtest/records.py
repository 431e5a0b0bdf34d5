"""What is kept of every draw that was judged: plain data, a line of the report's records each."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from equivtest.kit.case import Case, to_data
from equivtest.ranks.reply import Reply
from equivtest.verdicts.verdict import Verdict

RECORD_SCHEMA = 1


def records_of(case: Case, verdicts: Sequence[Verdict], replies: Sequence[Reply]) -> list[dict[str, Any]]:
    """One record per draw that was judged: the case, its place in the case space, kind by claim, what was lacking."""
    of_all_draws = {
        "schema": RECORD_SCHEMA,
        "case": to_data(case),
        "world_size": case.world_size,
        "dtype": case.dtype,
        "shard_kind": case.shard_kind,
        "refusal": case.refusal,
        "busy_s": max((reply.busy_s for reply in replies), default=0.0),
    }
    if lacking := next((reply for reply in replies if reply.outcome == "not_supported"), None):
        of_all_draws |= {"lacking": lacking.error_text, "refused": list(lacking.lacking)}
    records: dict[int, dict[str, Any]] = {}
    for verdict in verdicts:
        mode, seed = case.values[verdict.draw]
        of_draw = {"subject": verdict.subject, "draw": verdict.draw, "mode": mode, "seed": seed}
        results: dict[str, Any] = {"verdicts": {}, "margins": {}, "tensor_margins": {}, "known": {}}
        record = records.setdefault(verdict.draw, of_all_draws | of_draw | results)
        record["verdicts"][verdict.claim] = verdict.kind
        record["margins"][verdict.claim] = min(verdict.margin, sys.float_info.max)  # JSON has no infinity
        record["tensor_margins"] |= {name: min(m, sys.float_info.max) for name, m in verdict.margins.items()}
        if verdict.known:
            record["known"][verdict.claim] = verdict.known
    return list(records.values())
