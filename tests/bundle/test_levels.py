"""A run reaches a level if each of its properties is complete, and so are all levels below."""

from __future__ import annotations

import pytest

from equivtest.pytest_plugin.suite import shipped
from equivtest.report.handover import listed_of
from equivtest.report.levels import LEVELS, in_lines, level_of, levels_of, reached, required_of
from equivtest.report.tally import Tally

REQUIRED = {"collectives": "collectives", "scale": "scale", "ddp_mlp": "ddp_mlp", "decoder": "module"}


def judged(*names: str, kinds: str = "holds", claim: str = "") -> list[Tally]:
    """Returns complete tallies, in which every claim holds except `claim`, which is of the kind."""
    tallies = []
    for name in names:
        tally = Tally(listed_of(shipped()[name], path="", name=name, planned=("w2-0",), has_audit=False))
        tally.done.add("w2-0")
        for each in tally.listed.claims:
            tally.kinds[each][kinds if each == claim else "holds"] += 1
        tallies.append(tally)
    return tallies


def test_every_shipped_property_has_a_level() -> None:
    levels = {level_of(subject) for subject in required_of(shipped()).values()}

    assert levels == set(range(1, len(LEVELS) + 1))


@pytest.mark.parametrize(
    ("names", "number"),
    [
        ((), 0),
        (("scale",), 0),
        (("collectives",), 1),
        (("collectives", "ddp_mlp", "decoder"), 1),
        (("collectives", "scale"), 2),
        (("collectives", "scale", "ddp_mlp", "decoder"), 4),
    ],
)
def test_level_is_reached_only_if_all_lower_levels_are_reached(names: tuple[str, ...], number: int) -> None:
    assert reached(levels_of(judged(*names), REQUIRED, {})) == number


@pytest.mark.parametrize(
    ("kind", "number", "said"),
    [
        ("value", 1, "level 2, parallel layers and fetches: 1 failing, first scale: repeats_itself"),
        ("inconclusive", 1, "level 2, parallel layers and fetches: 1 open, first scale: repeats_itself"),
        ("known", 2, "level 2, parallel layers and fetches: complete: 6 keys hold, 1 known to fail"),
    ],
)
def test_level_is_reached_only_if_its_claims_hold_or_fail_as_known(kind: str, number: int, said: str) -> None:
    tallies = judged("collectives") + judged("scale", kinds=kind, claim="repeats_itself")
    levels = levels_of(tallies, REQUIRED, {})

    assert reached(levels) == number
    assert said in list(in_lines(levels))


def test_level_is_not_reached_if_a_cell_has_no_conclusive_verdict() -> None:
    levels = levels_of(
        judged("collectives"), REQUIRED, {"collectives": ("world size 2, float32, even shards: no case",)}
    )

    assert reached(levels) == 0
    assert "1 open, first collectives: world size 2" in str(levels[0])
