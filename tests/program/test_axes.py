"""Meshes of two named axes: a batch is divided along one of them, and gradients cover all parts of the batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from equivtest.errors import Misuse
from equivtest.module import module_property
from equivtest.oracle import expect
from equivtest.programs.case import ModuleCase
from equivtest.programs.mesh import mesh_along, meshes_of
from equivtest.property import Space, resolved
from equivtest.ranks.pool import Pool
from equivtest.search.audit import audit
from equivtest.search.chunks import Chunk
from equivtest.search.known import KnownFailures
from equivtest.search.search import search
from equivtest.verdicts.judging import check, judge
from equivtest.verdicts.verdict import ValueMismatch
from tests.drawing import drawn

HERE, MLP = "tests.programs.axes:", "tests.programs.held:mlp"
AXES = ("dp", "tp")
DTYPES = ("float32", "bfloat16")
MESHES = [mesh for size in (1, 2, 3, 4) for mesh in meshes_of(size, 2)]


def case_of(parallelize: str, mesh: tuple[int, int], **fields: Any) -> ModuleCase:
    """Builds a case with two rows for each part of the batch, divided along "dp" by default."""
    parts = mesh[AXES.index(fields.get("batch_axis") or "dp")]
    world_size = mesh[0] * mesh[1]
    common = {"build": MLP, "batch": "mean of parts", "x_shape": (2 * parts, 3), "axes": AXES, "repeats": True}
    common["values"] = (("dense", 0), ("dense", 1))
    return ModuleCase(parallelize=HERE + parallelize, world_size=world_size, mesh=mesh, **common | fields)


def deep_case(parallelize: str, mesh: tuple[int, int], **fields: Any) -> ModuleCase:
    """Judged part by part."""
    fields |= {"build": HERE + "deep", "by_parts": True, "values": (("real", 0),), "repeats": False}
    return case_of(parallelize, mesh, **fields)


@pytest.mark.ranks
@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("parallelize", ["fsdp2_tp", "ddp_megatron", "by_hand"])
def test_right_program_with_data_and_tensor_parallelism_passes(
    pool: Pool, parallelize: str, mesh: tuple[int, int]
) -> None:
    """Covers every mesh; parameters are DTensors of both axes, of one, or plain.  A mean of three parts is rounded."""
    for dtype in DTYPES if mesh in ((2, 2), (3, 1)) else ("float32",):
        verdicts = check("module", case_of(parallelize, mesh, dtype=dtype), pool)
        assert {verdict.kind for verdict in verdicts} == {"holds"}


@pytest.mark.ranks
@pytest.mark.parametrize("mesh", [(2, 1), (1, 2), (2, 2)], ids=str)
@pytest.mark.parametrize("parallelize", ["tensor_parallel", "whole_on_dp", "fsdp2_tp"])
def test_right_program_on_two_axes_passes_if_every_rank_has_the_whole_batch(
    pool: Pool, parallelize: str, mesh: tuple[int, int]
) -> None:
    verdicts = check("module", case_of(parallelize, mesh, batch="whole", x_shape=(2, 3)), pool)

    assert {verdict.kind for verdict in verdicts} == {"holds"}


@pytest.mark.ranks
def test_batch_may_be_divided_along_the_second_axis(pool: Pool) -> None:
    case = case_of("along_the_other_axis", (1, 3), batch_axis="tp")
    assert [layout.placements for layout in {case.layouts()["x"]}] == [case.rows_layout.placements]
    assert (case.num_parts, case.rows, case.ranks_of_part(2)) == (3, (2, 2, 2), (2,))

    right = ModuleCase(
        build=MLP, parallelize=HERE + "fsdp2_along_tp", world_size=4, mesh=(2, 2), axes=AXES, batch_axis="tp",
        batch="mean of parts", x_shape=(3, 3),
    )  # fmt: skip
    assert {verdict.kind for verdict in check("module", right, pool)} == {"holds"}


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("parallelize", "tensor"),
    [
        ("along_the_other_axis", r"grad\.0\.weight"),
        ("along_both", r"grad\.0\.weight"),
        ("not_at_all", r"grad\.0\.weight"),
        ("of_the_whole_world", "output"),
    ],
)
def test_reduction_along_a_wrong_axis_is_rejected(pool: Pool, parallelize: str, tensor: str) -> None:
    with pytest.raises(ValueMismatch, match=rf"module: {tensor} differs from the oracle"):
        check("module", case_of(parallelize, (2, 2)), pool)


@pytest.mark.ranks
def test_right_program_on_two_axes_passes_on_real_values(pool: Pool) -> None:
    case = case_of("fsdp2_tp", (2, 2), values=(("real", 0), ("real", 1)), dtype="float64")

    assert {verdict.kind for verdict in check("module", case, pool)} == {"holds"}


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("parallelize", "mesh"),
    [("deep_fsdp2_tp", (2, 2)), ("deep_fsdp2_tp", (2, 1)), ("deep_megatron", (2, 2)), ("deep_megatron", (1, 2))],
    ids=str,
)
def test_each_submodule_of_a_right_program_on_two_axes_passes(
    pool: Pool, parallelize: str, mesh: tuple[int, int]
) -> None:
    for dtype in DTYPES:
        kinds = {verdict.kind for verdict in check("module", deep_case(parallelize, mesh, dtype=dtype), pool)}
        assert kinds == {"holds"} or (dtype == "bfloat16" and kinds == {"holds", "inconclusive"})


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("parallelize", "boundary", "rank"),
    [("deep_with_a_wrong_norm", r"2\.norm", "2"), ("deep_with_a_bias_of_every_rank", r"1\.down", "0")],
)
def test_message_names_the_first_wrong_submodule_on_two_axes(
    pool: Pool, parallelize: str, boundary: str, rank: str
) -> None:
    with pytest.raises(ValueMismatch, match=rf"boundary\.{boundary} differs(.|\n)*rank {rank} of 4"):
        check("module", deep_case(parallelize, (2, 2), dtype="float32"), pool)


def test_reference_runs_once_on_each_part_of_the_batch() -> None:
    case = case_of("fsdp2_tp", (2, 2))
    alone = ModuleCase(build=MLP, parallelize="", world_size=2, batch="mean of parts", x_shape=(4, 3))
    found = expect(case, 0).tensors

    assert case.rows == alone.rows == (2, 2) and found.keys() == expect(alone, 0).tensors.keys()
    assert [case.ranks_of_part(part) for part in (0, 1)] == [(0, 1), (2, 3)]
    assert found["output"].value.shape == (4, 2)


@pytest.mark.ranks
@pytest.mark.parametrize("parallelize", ["fsdp2_tp", "ddp_megatron"])
def test_property_on_two_axes_passes_its_claims_and_its_audit(pool: Pool, tmp_path: Path, parallelize: str) -> None:
    prop = module_property(MLP, HERE + parallelize, [(3, 3), (4, 3)], axes=AXES)
    found = search(prop, Chunk(4, ("float32",), 0, 8), pool, KnownFailures(), tmp_path)
    audited = audit(prop, pool, KnownFailures(), (4,), ("float32",))

    assert not found.misuse and found.records and not found.failures
    assert not audited.problem


@pytest.mark.ranks
def test_meshes_of_every_shape_are_drawn(pool: Pool) -> None:
    space = Space((1, 2, 4), ("float32",))
    prop = resolved(module_property(MLP, HERE + "fsdp2_tp", [(2, 3)], axes=AXES), pool, space)
    cases = drawn(prop.cases(space), 100)

    assert {case.batch for case in cases} == {"mean of parts"}
    assert {case.world.mesh for case in cases} == {(1, 1), (2, 1), (1, 2), (4, 1), (2, 2), (1, 4)}
    assert not any(case.members for case in cases)


@pytest.mark.ranks
def test_case_with_fewer_rows_than_parts_raises_misuse(pool: Pool) -> None:
    prop = module_property(MLP, HERE + "by_hand", [(1, 3)], axes=AXES, batch="mean of parts")
    cases = drawn(prop.cases(Space((2,), ("float32",))), 20)

    assert {(case.world.mesh, case.arguments.x_shape) for case in cases} == {
        ((1, 2), (1, 3)),
        ((2, 1), (2, 3)),
        ((2, 1), (3, 3)),
    }
    with pytest.raises(Misuse, match=r"torch.chunk cannot divide x of shape \(1, 3\) among 2 ranks"):
        judge("module", case_of("by_hand", (2, 1), x_shape=(1, 3)), pool)


def test_meshes_of_a_world_have_every_factorization_of_its_size() -> None:
    assert meshes_of(4, 2) == ((4, 1), (2, 2), (1, 4))
    assert meshes_of(3, 1) == ((3,),) and meshes_of(3, 0) == ((),)
    assert meshes_of(2, 3) == ((2, 1, 1), (1, 2, 1), (1, 1, 2))
    assert (mesh_along(4, AXES, ""), mesh_along(4, AXES, "tp"), mesh_along(4, (), "")) == ((4, 1), (1, 4), ())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"mesh": (2, 1), "axes": ()}, r"mesh must say how many ranks lie along each of axes \(\), got \(2, 1\)"),
        ({"mesh": (2,)}, "along each of axes"),
        ({"mesh": (2, 2)}, r"mesh must have 2 ranks, got \(2, 2\)"),
        ({"mesh": (2, 0)}, "along each of axes"),
        ({"axes": ("dp", "dp")}, r"axes must be different names, such as \('dp', 'tp'\), got \('dp', 'dp'\)"),
        ({"axes": ("dp", "t p")}, "axes must be different names"),
        ({"batch_axis": "pp"}, "batch_axis must be one of axes dp, tp, got 'pp'"),
        ({"members": (1, 0)}, "members need a mesh of one axis"),
    ],
)
def test_invalid_mesh_raises_misuse(fields: dict[str, Any], message: str) -> None:
    fields = {"mesh": (2, 1), "axes": AXES} | fields
    with pytest.raises(Misuse, match=message):
        ModuleCase(build=MLP, parallelize="", world_size=2, x_shape=(2, 3), **fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"axes": ("dp", "dp")}, "axes must be different names"),
        ({"axes": AXES, "batch_axis": "pp"}, "batch_axis must be one of axes dp, tp, got 'pp'"),
        ({"batch_axis": "dp"}, "batch_axis must be one of axes none, got 'dp'"),
    ],
)
def test_invalid_property_on_two_axes_raises_misuse(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(Misuse, match=message):
        module_property(MLP, HERE + "by_hand", [(2, 3)], **fields)
