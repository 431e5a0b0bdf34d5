"""Defines the fixture `ranks`, with which your own tests run cases on rank processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import pytest

from equivtest.base import limits
from equivtest.property import require_limit
from equivtest.pytest_plugin.pools import pool_of

if TYPE_CHECKING:
    from equivtest.cases.case import Case
    from equivtest.ranks.reply import Reply
    from equivtest.verdicts.claims import Claim
    from equivtest.verdicts.verdict import Verdict


class Ranks:
    """The ranks of this pytest process. They start at the first run of a case."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    def run(self, subject: str, case: Case, *, limit_s: float = limits.CASE_S) -> Sequence[Reply]:
        """Runs `subject` on `case` on all ranks and returns one reply per rank, in rank order."""
        require_limit(limit_s)
        return pool_of(self._config).run(subject, case, limit_s=limit_s)

    def check(
        self,
        subject: str,
        case: Case,
        claims: Sequence[Claim] | None = None,
        *,
        like: str = "",
        limit_s: float = limits.CASE_S,
    ) -> list[Verdict]:
        """Runs `case`, judges the claims and returns their verdicts.

        Args:
            claims: Claims to judge. If None, these are the claims that `equivtest check` judges.
            like: Name of a property. The claims of this property are judged on your own subject.

        Raises:
            ClaimFailed: a claim fails. The kind of the first failure determines the subclass.
            Misuse: there is no such subject, or the subject breaks its contract with the harness.
            Inconclusive, BrokenSetup: the run allows no conclusion.
        """
        from equivtest.pytest_plugin.suite import claims_of
        from equivtest.verdicts.judging import check

        chosen = claims or claims_of(subject, case, like)
        return check(subject, case, pool_of(self._config), chosen, limit_s=limit_s)
