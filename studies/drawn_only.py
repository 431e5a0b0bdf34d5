"""A pytest plugin (`-p studies.drawn_only`) that makes searches draw their cases and run none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest


def pytest_configure(config: pytest.Config) -> None:
    from equivtest.cases.case import Case
    from equivtest.search import search
    from equivtest.search.records import records_of
    from equivtest.verdicts.verdict import Judgement, Verdict

    def note(running: Any, cases: Sequence[Case], **_: object) -> None:
        for case in cases:
            verdicts = [
                Verdict(
                    claim=running.prop.claims[0].name,
                    subject=running.prop.subject,
                    case=case,
                    judgement=Judgement("inconclusive"),
                    draw=draw,
                )
                for draw in range(len(case.values))
            ]
            running.records += records_of(case, verdicts, [])

    search.Searching.judge_cases = note  # type: ignore[method-assign]
