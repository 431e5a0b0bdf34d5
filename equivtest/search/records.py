"""Makes the records that a report stores, one for each draw with a verdict."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import msgspec

from equivtest.cases.case import Case, to_data
from equivtest.ranks.reply import Reply
from equivtest.report.handover import Record
from equivtest.verdicts.verdict import Verdict

RECORD_SCHEMA = 1


def records_of(case: Case, verdicts: Sequence[Verdict], replies: Sequence[Reply]) -> list[Record]:
    lacking = next((reply for reply in replies if reply.outcome == "not_supported"), None)
    declined = next((reply.error_text for reply in replies if reply.outcome == "declined"), None)
    records: dict[int, Record] = {}
    for verdict in verdicts:
        if verdict.draw not in records:
            mode, seed = case.values[verdict.draw]
            records[verdict.draw] = Record(
                schema=RECORD_SCHEMA,
                case=to_data(case),
                world_size=case.world_size,
                dtype=case.dtype,
                shard_kind=case.shard_kind,
                refusal=case.refusal,
                busy_s=max((reply.busy_s for reply in replies), default=0.0),
                lacking=lacking.error_text if lacking else None,
                refused=refused_in(replies) if lacking else None,
                declined=declined,
                subject=verdict.subject,
                draw=verdict.draw,
                mode=mode,
                seed=seed,
                verdicts={},
                margins={},
                tensor_margins={},
                known={},
            )
        record, judged = records[verdict.draw], verdict.judgement
        record.verdicts[verdict.claim] = judged.kind
        record.margins[verdict.claim] = _finite(judged.margin)
        record.tensor_margins.update((name, _finite(margin)) for name, margin in judged.margins.items())
        record.parts.update((name, None if part is None else _finite(part)) for name, part in judged.parts.items())
        record.factors.update(judged.factors)
        wrong = [mismatch.tensor for mismatch in judged.mismatches if mismatch.tensor in judged.parts]
        if wrong and not record.begins:
            records[verdict.draw] = msgspec.structs.replace(record, begins=wrong[0])
        if verdict.known:
            record.known[verdict.claim] = verdict.known
    return list(records.values())


def refused_in(replies: Sequence[Reply]) -> tuple[str, ...]:
    """Returns 'dtype:function' of each collective that the backend refused on some rank."""
    return tuple(dict.fromkeys(name for reply in replies for name in reply.lacking))


def _finite(margin: float) -> float:
    return min(margin, sys.float_info.max)  # JSON has no infinity
