"""Cases that a program does not support count as neither failure nor proof; some refusals are misuse."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from equivtest import NotSupported
from equivtest.base import limits
from equivtest.cases.case import from_code
from equivtest.errors import Inconclusive, Misuse
from equivtest.module import module_property
from equivtest.programs.case import ModuleCase
from equivtest.property import Property, Space, resolved
from equivtest.pytest_plugin.suite import shipped
from equivtest.ranks.pool import Pool
from equivtest.search.audit import audit
from equivtest.search.chunks import Chunk
from equivtest.search.known import KnownFailures
from equivtest.search.search import Findings, Target, search
from equivtest.verdicts.judging import check, judge
from equivtest.verdicts.verdict import RankRaised
from tests.commands import Command

HERE = "tests.programs.unsupported:"
STEPPED = {"step": HERE + "step", "values": (("real", 0),)}
MEAN = "mean of parts"
SHAPES = [(2, 3), (3, 3), (5, 3)]


def case_of(parallelize: str, world_size: int = 2, **fields: Any) -> ModuleCase:
    fields = {"build": "tests.programs.module:mlp", "x_shape": (5, 3)} | fields
    return ModuleCase(parallelize=HERE + parallelize, world_size=world_size, **fields)


def claimed(parallelize: str, build: str = "tests.programs.module:mlp", **given: Any) -> Property:
    """A property of it; no module may hold one, or pytest would run it."""
    given = {"x_shapes": SHAPES, "batch": "whole"} | given
    return module_property(build, HERE + parallelize, **given)


def searched(pool: Pool, folder: Path, prop: Property, world_size: int = 2, only: Target | None = None) -> Findings:
    return search(prop, Chunk(world_size, ("float32",), 0, 6), pool, KnownFailures(), folder, only=only)


def kinds_of(found: Findings) -> set[str]:
    return {kind for record in found.records for kind in record.verdicts.values()}


# Declined cases.


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("parallelize", "fields", "reason"),
    [
        ("divides", {"world_size": 3}, "8 features do not divide among 3 ranks"),
        ("of_few_rows", {}, "5 rows do not fit"),
        ("of_few_rows_backward", {}, "5 rows do not fit"),
        (
            "right",
            {"world_size": 3, "needs_world": True, "set_up": HERE + "set_up", "tear_down": HERE + "tear_down"},
            "no groups of three",
        ),
        ("replicates_on_two", {"build": HERE + "with_loss", "batch": "parts of the whole"} | STEPPED, "no steps yet"),
    ],
    ids=["parallelize", "forward", "backward", "set_up", "step"],
)
def test_case_is_declined_if_any_function_of_the_program_raises_not_supported(
    pool: Pool, parallelize: str, fields: dict[str, Any], reason: str
) -> None:
    case = case_of(parallelize, **({"members": ()} | fields))
    [verdict] = judge("module", case, pool)

    assert (verdict.kind, verdict.failed) == ("declined", False)
    assert verdict.detail.startswith(f"rank 0 of {case.world_size} does not support the case: {reason}")


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("parallelize", "reason"),
    [
        ("without_a_reason", "NotSupported without a reason"),
        ("at_length", "no heads, no heads, .*, no h[^\n]{0,9}"),
    ],
)
def test_reason_of_a_declined_case_is_shortened_to_one_line(pool: Pool, parallelize: str, reason: str) -> None:
    [verdict] = judge("module", case_of(parallelize), pool)
    said = verdict.detail.splitlines()[0].partition("does not support the case: ")[2]

    assert re.fullmatch(reason, said) and len(said) <= limits.REASON_CHARS


@pytest.mark.ranks
def test_longer_time_limit_gives_slow_ranks_more_time_to_decline(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "REFUSAL_GRACE_S", 0.5)
    kinds = [{v.kind for v in judge("module", case_of("one_after_the_other"), pool, limit_s=s)} for s in (60, 300)]

    assert kinds == [{"raised"}, {"declined"}]


@pytest.mark.ranks
def test_ranks_that_declined_at_the_same_point_are_kept(pool: Pool) -> None:
    judge("module", case_of("of_few_rows"), pool)
    before = pool._worlds[2].pids

    assert {verdict.kind for verdict in check("module", case_of("of_few_rows", x_shape=(2, 3)), pool)} == {"holds"}
    assert pool._worlds[2].pids == before


@pytest.mark.ranks
def test_ranks_that_declined_at_different_points_are_replaced(pool: Pool) -> None:
    """Otherwise a collective of the next case would pair with one that a rank has already begun."""
    assert {verdict.kind for verdict in judge("module", case_of("out_of_step"), pool)} == {"declined"}
    assert {verdict.kind for verdict in check("module", case_of("right"), pool)} == {"holds"}


@pytest.mark.ranks
def test_ranks_whose_set_up_function_stopped_halfway_are_replaced(pool: Pool) -> None:
    """Otherwise the next case would find a library that cannot be set up twice."""
    given = {"needs_world": True, "set_up": HERE + "set_up_halfway", "tear_down": HERE + "tear_down", "members": ()}
    kinds = [{verdict.kind for verdict in judge("module", case_of("right", **given), pool)} for _ in range(2)]

    assert kinds == [{"declined"}, {"declined"}]


@pytest.mark.ranks
def test_check_of_a_declined_case_raises_inconclusive(pool: Pool) -> None:
    with pytest.raises(Inconclusive, match=r"nothing was shown .* does not support the case: 8 features do not divide"):
        check("module", case_of("divides", 3), pool)


@pytest.mark.ranks
def test_search_counts_declined_cases_with_reasons(pool: Pool, tmp_path: Path) -> None:
    found = searched(pool, tmp_path, claimed("of_few_rows"))

    assert (found.failures, found.misuse, kinds_of(found)) == ([], "", {"holds", "declined"})
    assert {record.declined for record in found.records} == {None, "5 rows do not fit"}


@pytest.mark.ranks
@pytest.mark.parametrize(("world_size", "batch"), [(2, MEAN), (3, "whole")])
def test_program_that_declines_the_batch_probe_declines_all_cases_of_this_world_size(
    pool: Pool, tmp_path: Path, world_size: int, batch: str
) -> None:
    found = searched(pool, tmp_path, claimed("replicates_on_two", batch=None), world_size)

    assert found.misuse == "" and {record.case["fields"].get("batch", "whole") for record in found.records} == {batch}
    assert kinds_of(found) == ({"holds"} if world_size == 2 else {"declined"})


@pytest.mark.ranks
def test_program_on_two_axes_that_declines_the_batch_probe_raises_misuse(pool: Pool) -> None:
    prop = claimed("replicates_on_two", batch=None, axes=("dp", "tp"))

    with pytest.raises(
        Misuse, match=r"does not support the mesh \(3, 1\), on which equivtest tried it: three are one too many"
    ):
        resolved(prop, pool, Space((3,), limits.DTYPES))


# Failures and mistakes.


@pytest.mark.ranks
def test_case_declined_by_only_some_ranks_fails_and_names_the_ranks(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "REFUSAL_GRACE_S", 1.0)  # the other ranks wait for rank 0 all that time
    said = r"rank 0 of 3 raised NotSupported: must be raised on every rank: raised on 0, not on 1, 2: 8 features"

    with pytest.raises(RankRaised, match=rf"{said}(.|\n)*rank 1 did not answer(.|\n)*rank 2 did not answer"):
        check("module", case_of("divides_as_rank_0_knows", 3), pool)


@pytest.mark.ranks
def test_not_supported_exception_of_another_package_does_not_decline_the_case(pool: Pool) -> None:
    with pytest.raises(RankRaised, match="raised NotSupported: not ours"):
        check("module", case_of("with_a_foreign_word"), pool)


@pytest.mark.ranks
def test_failure_never_shrinks_to_a_declined_case(pool: Pool, tmp_path: Path) -> None:
    prop = claimed("wrong_of_two_rows", x_shapes=[(1, 3), (2, 3), (5, 3)])
    found = searched(pool, tmp_path, prop, only=("equals_unsharded", "value"))
    cases = [from_code(failure.case) for failure in found.failures]

    assert "declined" in kinds_of(found) and cases
    assert {case.arguments.x_shape for case in cases if isinstance(case, ModuleCase)} == {(2, 3)}


@pytest.mark.parametrize(
    ("build", "given", "who"),
    [
        ("refusing", {}, "build '.*:refusing' raised NotSupported: no such module"),
        ("looking", {}, "raised OfFewRows: 8 rows"),
        ("looking", {"batch": MEAN}, "raised OfFewRows: 4 rows"),
        ("looking", {"batch": MEAN, "axes": ("dp", "tp"), "x_shapes": [(2, 3), (5, 3)]}, "raised OfFewRows: 5 rows"),
        ("looking", {"by_parts": True}, "raised OfFewRows: 8 rows"),
        ("looking_backward", {}, "raised NotSupported: 8 rows"),
    ],
)
def test_reference_that_raises_not_supported_raises_misuse(build: str, given: dict[str, Any], who: str) -> None:
    """It may not decline one shape of several either, or one mesh; that case would be left out silently."""
    prop = claimed("right", HERE + build, **({"x_shapes": [(2, 3), (8, 3)]} | given))

    with pytest.raises(Misuse, match=f"{who}.*: the unsharded module defines the right result"):
        prop.cases(Space((2,), ("float32",)))


def test_reference_may_refuse_rows_that_no_shape_lists() -> None:
    prop = claimed("right", HERE + "looking", x_shapes=[(2, 3)], batch=MEAN, state="whole batch")

    with pytest.raises(Misuse, match=r"the ranks can divide no x of shape \(2, 3\): torch.chunk cannot divide"):
        prop.cases(Space((5,), ("float32",)))


def test_not_supported_without_a_reason_is_refused() -> None:
    with pytest.raises(TypeError, match="reason"):
        NotSupported()  # type: ignore[call-arg]


# Audits.


@pytest.mark.ranks
def test_audit_does_not_count_a_declined_case_as_a_rejection(pool: Pool) -> None:
    prop = replace(shipped()["zero3_fetch_all_gather"], subject=HERE + "where_the_sum_is_another")
    found = audit(prop, pool, KnownFailures(), (2,), ("float32",))

    assert "its collectives ignored the other ranks (all_reduce in the forward)" in found.problem
    assert all(row.rejected == 0 for row in found.rows.values())


@pytest.mark.ranks
@pytest.mark.parametrize(("parallelize", "num_cases"), [("never", 0), ("divides", 4)])
def test_declined_case_is_not_audited(pool: Pool, parallelize: str, num_cases: int) -> None:
    found = audit(claimed(parallelize), pool, KnownFailures(), (2, 3), ("float32",))

    assert bool(found.declined) and (found.cases > 0) == (num_cases > 0)
    assert ("supports none of" in found.problem) == (num_cases == 0)


# Whole runs.

SUITE = """
from equivtest.module import module_property

mine = module_property(
    "tests.programs.module:mlp", "tests.programs.unsupported:{}", {}, batch="whole"
)
"""


def run_of(command: Command, folder: Path, parallelize: str, *args: str) -> tuple[int, str]:
    """Exit code and output of a small run of a property."""
    (folder / "test_mine.py").write_text(SUITE.format(parallelize, SHAPES))
    options = ("--profile=smoke", "--dtypes=float32", "--known-failures=none", "-n0")
    ended = command(folder, "run", "test_mine.py", *options, *args)
    return ended.code, ended.stdout


@pytest.mark.ranks
def test_run_with_some_declined_cases_passes_and_lists_their_reasons(command: Command, tmp_path: Path) -> None:
    code, told = run_of(command, tmp_path, "divides", "--world-sizes=2,3", "--report=report")
    lines = [line for line in told.splitlines() if line.startswith("program ")]

    assert code == 0 and len(lines) == 1
    assert "program mine: does not support" in lines[0] and "8 features do not divide among 3 ranks (" in lines[0]
    assert "8 features do not divide among 3 ranks" in (tmp_path / "report" / "report.html").read_text()


@pytest.mark.ranks
@pytest.mark.parametrize("audited", ["on", "off"])
def test_run_ends_with_exit_code_2_if_every_case_on_several_ranks_is_declined(
    command: Command, tmp_path: Path, audited: str
) -> None:
    code, told = run_of(command, tmp_path, "never", "--world-sizes=1,2", f"--audit={audited}")

    assert code == 2 and "mine: the program supports no case on several ranks that was tried: several ranks are" in told
    assert re.search(r"; of (\d) claims \1 open$", told, re.MULTILINE)
