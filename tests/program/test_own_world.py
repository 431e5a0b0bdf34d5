"""Programs with their own process groups: the world they need, set up and torn down, or fresh ranks."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from equivtest.errors import Misuse
from equivtest.module import module_property
from equivtest.programs.case import ModuleCase
from equivtest.programs.property import CONTRACT_OF
from equivtest.property import Space
from equivtest.ranks.pool import Pool
from equivtest.search.audit import audit
from equivtest.search.chunks import Chunk
from equivtest.search.known import KnownFailures
from equivtest.search.search import search
from equivtest.verdicts.judging import check
from equivtest.verdicts.verdict import RankRaised, ValueMismatch
from tests.drawing import drawn

HERE = "tests.programs.world:"
SET_UP, TEAR_DOWN = {"set_up": HERE + "initialize"}, {"tear_down": HERE + "destroy"}


def case_of(parallelize: str, **fields: Any) -> ModuleCase:
    """Two draws, the first of them twice, on two ranks unless said otherwise."""
    fields = {"world_size": 2, "x_shape": (2, 3), "needs_world": True, "repeats": True} | fields
    values = (("dense", 0), ("dense", 1))
    return ModuleCase(build=HERE + "mlp", parallelize=HERE + parallelize, values=values, **fields)


@pytest.mark.ranks
@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("fields", [SET_UP | TEAR_DOWN, SET_UP], ids=["with tear_down", "without tear_down"])
def test_library_is_set_up_for_each_case(pool: Pool, fields: dict[str, str], world_size: int) -> None:
    for _ in range(2):
        verdicts = check("module", case_of("library", world_size=world_size, **fields), pool)
        assert {verdict.kind for verdict in verdicts} == {"holds"}


@pytest.mark.ranks
def test_state_of_a_library_ends_with_its_case_without_a_tear_down_function(pool: Pool) -> None:
    check("module", case_of("library", **SET_UP), pool)

    with pytest.raises(RankRaised, match="tensor parallelism is not initialized"):
        check("module", case_of("library"), pool)


@pytest.mark.ranks
@pytest.mark.parametrize("world_size", [1, 3])
def test_environment_variables_name_rank_and_store_if_needs_world_is_true(pool: Pool, world_size: int) -> None:
    check("module", case_of("asks_its_environment", world_size=world_size), pool)
    check("module", case_of("asks_in_vain", world_size=world_size, needs_world=False), pool)


@pytest.mark.ranks
@pytest.mark.parametrize("world_size", [1, 2])
def test_default_process_group_that_is_bound_at_import_is_the_world(pool: Pool, world_size: int) -> None:
    verdicts = check("module", case_of("leaves_its_group_out", world_size=world_size, needs_world=False), pool)

    assert {verdict.kind for verdict in verdicts} == {"holds"}


def test_cases_of_a_module_property_run_on_the_whole_world() -> None:
    """A mesh within a larger world would have another group than the default one."""
    prop = module_property(HERE + "mlp", HERE + "leaves_its_group_out", [(2, 3)], batch="whole")

    assert not any(case.members for case in drawn(prop.cases(Space((2,), ("float32",))), 100))


@pytest.mark.ranks
def test_program_with_a_wrong_set_up_function_is_rejected(pool: Pool) -> None:
    fields = {"set_up": HERE + "initialize_wrongly", "tear_down": HERE + "forget"}

    with pytest.raises(ValueMismatch, match=r"module: output differs(.|\n)*param\.0\.weight, param\.2\.weight agree"):
        check("module", case_of("library", **fields), pool)


@pytest.mark.ranks
def test_not_supported_raised_in_tear_down_raises_misuse(pool: Pool) -> None:
    fields = SET_UP | {"tear_down": HERE + "declines_late"}

    with pytest.raises(
        Misuse, match="raised NotSupported, after the case had run: what was run already: raise it earlier"
    ):
        check("module", case_of("library", **fields), pool)


@pytest.mark.ranks
def test_no_rank_is_torn_down_before_all_ranks_have_finished(pool: Pool) -> None:
    case = dataclasses.replace(case_of("late_on_rank_0", tear_down=HERE + "after_all"), values=(("dense", 0),))
    pool.renew(2)
    replies = pool.run(CONTRACT_OF, dataclasses.replace(case, repeats=False))

    assert [reply.error_text for reply in replies if reply.outcome != "answered"] == []


@pytest.mark.ranks
def test_no_rank_waits_for_a_rank_that_failed_in_set_up(pool: Pool) -> None:
    fields = {"set_up": HERE + "raises_on_rank_0", "tear_down": HERE + "forget"}
    case = dataclasses.replace(case_of("late_on_rank_0", **fields), values=(("dense", 0),), repeats=False)
    pool.renew(2)

    assert [reply.outcome for reply in pool.run(CONTRACT_OF, case)] == ["raised", "answered"]


@pytest.mark.ranks
def test_error_of_a_program_is_reported_although_tear_down_raises(pool: Pool) -> None:
    fields = SET_UP | {"tear_down": HERE + "raises_too"}

    with pytest.raises(RankRaised, match="RuntimeError: it cannot be made"):
        check("module", case_of("raises", **fields), pool)


@pytest.mark.ranks
@pytest.mark.parametrize("tear_down", [TEAR_DOWN, {}], ids=["with tear_down", "without tear_down"])
def test_property_of_a_library_passes_its_claims_and_its_audit(
    pool: Pool, tmp_path: Path, tear_down: dict[str, str]
) -> None:
    prop = module_property(HERE + "mlp", HERE + "library", [(2, 3)], **SET_UP, **tear_down)
    found = search(prop, Chunk(2, ("float32", "bfloat16"), 0, 3), pool, KnownFailures(), tmp_path)
    audited = audit(prop, pool, KnownFailures(), (2,), ("float32",))

    assert not found.misuse and found.records and not found.failures
    assert audited.sites and not audited.unseen


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"needs_world": False, **SET_UP}, "set_up and tear_down need needs_world=True"),
        ({"needs_world": False, **TEAR_DOWN}, "set_up and tear_down need needs_world=True"),
        (
            {"members": (1, 0)},
            r"a program with needs_world=True runs on all processes: leave members out, got \(1, 0\)",
        ),
    ],
)
def test_invalid_case_with_a_set_up_raises_misuse(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(Misuse, match=message):
        case_of("library", **fields)
