"""Claims that `equivtest check` judges: those of a property, so that a case that fails there fails here too."""

from __future__ import annotations

from typing import cast

import pytest

from equivtest.cases.case import Case
from equivtest.errors import Misuse
from equivtest.families.zero3.fetch.case import FetchCase, RefusedFetchCase
from equivtest.pytest_plugin import fixture
from equivtest.pytest_plugin.suite import claims_of, shipped
from equivtest.verdicts.claims import equals_unsharded
from equivtest.verdicts.judging import default_claims

FETCH = FetchCase(world_size=1, values=(("special", 0),), collective="all_gather")
REFUSED = RefusedFetchCase(world_size=2, misfit="in_flight")
OWN = "mypackage.parallel:my_fetch"


@pytest.mark.parametrize(
    ("subject", "case", "like", "judging"),
    [
        ("zero3_fetch_all_gather", FETCH, "", "zero3_fetch_all_gather"),
        ("zero3_fetch_all_gather", REFUSED, "", "zero3_fetch_all_gather_refuses"),
        (OWN, FETCH, "zero3_fetch_all_reduce", "zero3_fetch_all_reduce"),
    ],
    ids=["property of the subject", "property of refusals", "property named by like"],
)
def test_check_uses_the_claims_of_the_property(subject: str, case: Case, like: str, judging: str) -> None:
    assert claims_of(subject, case, like) == shipped()[judging].claims


def test_subject_without_property_has_default_claims() -> None:
    assert claims_of(OWN, FETCH) == default_claims(FETCH)


@pytest.mark.parametrize(
    ("case", "like", "kind"),
    [(REFUSED, "zero3_fetch_all_gather", "cases that are not"), (FETCH, "zero3_fetch_all_gather_refuses", "refused")],
)
def test_case_whose_class_the_property_does_not_judge_raises_misuse(case: Case, like: str, kind: str) -> None:
    with pytest.raises(Misuse, match=f"--like: {like} judges only {kind}"):
        claims_of(OWN, case, like)


def test_error_for_an_unknown_property_suggests_the_nearest_name() -> None:
    with pytest.raises(Misuse, match="--like: no property is called 'zero3_fetch'; did you mean 'zero3_fetch_all_"):
        claims_of(OWN, FETCH, "zero3_fetch")


def test_ranks_fixture_checks_the_claims_of_the_property(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fixture, "pool_of", lambda config: None)
    monkeypatch.setattr("equivtest.verdicts.judging.check", lambda subject, case, pool, claims, **fields: claims)
    ranks = fixture.Ranks(cast(pytest.Config, None))

    assert ranks.check(OWN, FETCH, like="zero3_fetch_all_reduce") == claims_of(OWN, FETCH, "zero3_fetch_all_reduce")
    assert ranks.check(OWN, FETCH, [equals_unsharded]) == [equals_unsharded]
