"""Perceptrons on a mesh of two axes: the case, where its parameters lie, and an oracle with a second opinion."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from equivtest.errors import Misuse
from equivtest.families.training.two_axes.case import TWO_AXIS_STYLES, TwoAxisCase
from equivtest.families.training.two_axes.known import has_rank_without_hidden
from equivtest.families.training.two_axes.strategy import two_axis_meshes
from equivtest.layout import Replicate, Shard, local_box
from equivtest.oracle.collectives import expected_collectives
from equivtest.ranks.pool import Pool
from equivtest.verdicts.claims import trains_like_unsharded, uses_only_collectives
from equivtest.verdicts.judging import DEFAULT_CLAIMS, judge
from tests.families.refusing import refuses
from tests.families.unsharded_training import ALL, BOTH


def two_axis_case(**fields: Any) -> TwoAxisCase:
    """Two by two ranks, two micro-batches of two rows each, parameters of 15, 5, 10 and 2 elements."""
    return TwoAxisCase(**{"world_size": 4, "mesh": (2, 2), "leading": (2,), "micro_batches": 2, "in_features": 3,
                          "hidden_features": 5, "out_features": 2, "biases": BOTH, "requires_grad": ALL,
                          "use_local_output": False, **fields})  # fmt: skip


def test_hsdp_gathers_a_weight_sharded_on_dim_1_without_padding() -> None:
    """Two ranks hold 10 elements each of a 5 x 4 in_proj.weight; by rows they would hold 3 of 5, 12."""
    case = two_axis_case(style="hsdp", in_features=4, by_columns=("in_proj.weight",), biases=(),
                         requires_grad=("in_proj.weight",), records=True)  # fmt: skip
    gathered = [call.size_bytes for call in expected_collectives(case, 0) if call.kind == "all_gather"]

    assert case.layouts()["grad.in_proj.weight"].placements == (Replicate(), Shard(1))
    assert set(gathered) == {10 * 4, 5 * 4}


def test_second_mesh_axis_divides_the_hidden_features_before_the_first_axis() -> None:
    """5 over two ranks of a row is 3 and 2; then each of these over the two rows: 2, 1 and 1, 1."""
    case = two_axis_case()
    layout = case.layouts()["param.in_proj.weight"]

    boxes = [local_box((5, 3), layout, (2, 2), rank)[0] for rank in range(4)]
    assert boxes == [(0, 2), (3, 4), (2, 3), (4, 5)]


def test_row_parallel_weight_is_sharded_on_two_dims_and_its_bias_on_one() -> None:
    layouts = two_axis_case().layouts()

    assert layouts["param.out_proj.weight"].placements == (
        Shard(0),
        Shard(1),
    )
    assert layouts["grad.out_proj.bias"].placements == (Shard(0), Replicate())


def test_ranks_of_a_mesh_row_share_their_rows_of_the_batch() -> None:
    case = two_axis_case()

    assert case.shapes()["x"] == (2 * 2 * 2, 3)
    assert case.layouts()["x"].placements == case.layouts()["grad.x"].placements == (Shard(0), Replicate())
    assert case.layouts()["grad.in_proj.output"].placements == (Shard(0), Shard(1))


def test_every_rank_has_different_rows_of_the_batch_under_hsdp() -> None:
    case = two_axis_case(style="hsdp")

    assert case.shapes()["x"] == (4 * 2 * 2, 3)
    assert case.layouts()["x"].placements == (Shard(0), Shard(0))
    assert case.layouts()["grad.out_proj.weight"].placements == (Replicate(), Shard(0))


test_error_for_an_invalid_case_names_the_invalid_field = refuses(
    two_axis_case,
    ({"mesh": (4,)}, "mesh must have 2 dims of at least 1"),
    ({"mesh": (4, 0)}, "mesh must have 2 dims of at least 1"),
    ({"mesh": (2, 3)}, "mesh must have 4 ranks"),
    ({"division": "sums"}, "division needs style 'hsdp', got 'fsdp2_tp'"),
    ({"style": "hsdp", "scatters_every": True, "syncs_every": True}, "set scatters_every or syncs_every"),
    ({"members": (3, 2, 1, 0)}, "members need a mesh of one axis"),
    ({"use_local_output": True}, "5 hidden features on 2 ranks are uneven: set use_local_output=False"),
)


def test_small_hidden_size_can_leave_a_rank_without_hidden_features() -> None:
    with_none = {size for size in range(1, 8) if has_rank_without_hidden(two_axis_case(hidden_features=size))}

    assert with_none == {1}
    assert has_rank_without_hidden(two_axis_case(world_size=3, mesh=(1, 3), hidden_features=4))
    assert not has_rank_without_hidden(two_axis_case(style="hsdp", hidden_features=1))


def test_most_meshes_of_six_ranks_have_several_ranks_on_both_axes() -> None:
    meshes = two_axis_meshes(6, "fsdp2_tp")

    assert set(meshes) == {(1, 6), (2, 3), (3, 2), (6, 1)}
    assert sum(1 not in mesh for mesh in meshes) > len(meshes) / 2


# ------------------------------------------------------------------------------------------------
# Collectives


def documented(rank: int, **fields: Any) -> Counter[str]:
    case = two_axis_case(**{"style": "hsdp", "micro_batches": 1, "records": True, **fields})
    return Counter(str(call) for call in expected_collectives(case, rank))


def test_hsdp_documents_gathers_in_mesh_rows_and_all_reduces_in_mesh_columns() -> None:
    """By hand: a rank holds 3 of 5 rows and 1 of 2: 3 x 3 + 3 numbers of in_proj, 5 + 1 of out_proj."""
    assert documented(3) == {
        "forward all_gather of 48 bytes on processes 2, 3": 1,
        "backward all_gather of 48 bytes on processes 2, 3": 1,
        "forward all_gather of 24 bytes on processes 2, 3": 1,
        "backward all_gather of 24 bytes on processes 2, 3": 1,
        "backward reduce_scatter of 96 bytes on processes 2, 3": 1,
        "backward reduce_scatter of 48 bytes on processes 2, 3": 1,
        "backward all_reduce of 48 bytes on processes 1, 3": 1,
        "backward all_reduce of 24 bytes on processes 1, 3": 1,
    }


def test_hsdp_documents_no_collective_in_a_mesh_row_or_column_of_one_rank() -> None:
    alone = documented(1, world_size=2, mesh=(1, 2), reshards=False, requires_grad=("out_proj.bias",))
    whole = documented(0, world_size=2, mesh=(2, 1), requires_grad=("out_proj.bias",))

    assert alone["backward all_reduce of 4 bytes on processes 1"] == 1 and alone.total() == 4
    assert whole == {"backward all_reduce of 8 bytes": 1}


def test_hsdp_documents_all_reduces_of_the_last_micro_batch_alone_if_it_scatters_every() -> None:
    once = documented(3)

    calls = documented(3, micro_batches=2, scatters_every=True)
    assert calls == {call: num if "all_reduce" in call else 2 * num for call, num in once.items()}


def test_fsdp2_tp_documents_all_reduces_in_rows_and_gathers_in_columns() -> None:
    """By hand: the second column has 2 of 5 hidden features, one per rank; 2 tokens of 2 features out and 3 in."""
    assert documented(3, style="fsdp2_tp", requires_grad=("x", *ALL[1:])) == {
        "forward scatter of 0 bytes on processes 2, 3": 3,
        "forward broadcast of 8 bytes on processes 2, 3": 1,
        "forward all_reduce of 16 bytes on processes 2, 3": 1,
        "backward all_reduce of 24 bytes on processes 2, 3": 1,
        "forward all_gather of 16 bytes on processes 1, 3": 1,
        "backward all_gather of 16 bytes on processes 1, 3": 1,
        "forward all_gather of 12 bytes on processes 1, 3": 1,
        "backward all_gather of 12 bytes on processes 1, 3": 1,
        "backward reduce_scatter of 32 bytes on processes 1, 3": 1,
        "backward reduce_scatter of 24 bytes on processes 1, 3": 1,
    }


def test_first_rank_of_a_row_scatters_divided_tensors_with_padding() -> None:
    """Six hidden features instead of five, of 3 features in and 2 out."""
    calls = documented(2, style="fsdp2_tp")

    assert [calls[f"forward scatter of {size} bytes on processes 2, 3"] for size in (72, 24, 48)] == [1, 1, 1]


def test_fsdp2_tp_documents_no_collective_on_an_axis_of_one_rank() -> None:
    row = documented(0, style="fsdp2_tp", world_size=2, mesh=(2, 1), reshards=False)
    column = documented(0, style="fsdp2_tp", world_size=2, mesh=(1, 2))

    assert not any("all_reduce" in call for call in row) and row.total() == 4 + 2 * 2
    assert not any("all_gather" in call or "reduce_scatter" in call for call in column)


def test_recording_collectives_of_a_two_axis_case_that_clips_raises_misuse() -> None:
    for style in TWO_AXIS_STYLES:
        clips: dict[str, Any] = {"optimizer": "sgd", "steps": 2, "clip_norm": 1.0, "requires_grad": ALL[1:]}
        with pytest.raises(Misuse, match="of two axes without clipping, are documented: set records=False"):
            two_axis_case(style=style, records=True, **clips)


@pytest.mark.ranks
@pytest.mark.parametrize("mesh", [(2, 3), (3, 2)])
@pytest.mark.parametrize("style", [style for style in TWO_AXIS_STYLES if style != "ddp_tp"])  # it has no such case
def test_torchs_training_passes_on_meshes_of_2_x_3_and_3_x_2_ranks(
    style: str, mesh: tuple[int, int], pool: Pool
) -> None:
    """Recorded, and clipped; 7 hidden features are uneven on either axis."""
    sizes: dict[str, Any] = {"hidden_features": 7, "out_features": 4, "requires_grad": ALL, "optimizer": "sgd"}
    case = two_axis_case(world_size=6, mesh=mesh, style=style, values=(("dense", 0), ("real", 1)), steps=2, **sizes)
    reduction: dict[str, Any] = {"scatters_every": True, "division": "factor"} if style == "hsdp" else {}
    claims = (*DEFAULT_CLAIMS, trains_like_unsharded, uses_only_collectives)
    verdicts = [
        verdict
        for each in (replace(case, records=True), replace(case, clip_norm=1.0, **reduction))
        for verdict in judge(f"{style}_mlp", each, pool, claims)
    ]

    assert {verdict.kind for verdict in verdicts} == {"holds"}
    assert len(verdicts) == 2 * (7 + 6)
