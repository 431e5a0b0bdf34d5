"""Embeddings: the case, its ids and values, the oracle beside torch's own kernel."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from equivtest.cases.values import draw
from equivtest.families.embedding.case import MISFITS, STYLES, EmbeddingCase, RefusedEmbeddingCase
from equivtest.families.embedding.known import has_empty_part
from equivtest.families.embedding.oracle import bound_gradient
from equivtest.families.embedding.values import draw_ids
from equivtest.layout import shard_bounds
from equivtest.oracle import expect
from equivtest.oracle.collectives import expected_collectives
from equivtest.oracle.held import put_together
from equivtest.oracle.rounding import TORCH_CPU
from equivtest.ranks.pool import Pool
from equivtest.tensors import DTYPES
from equivtest.verdicts.elements import is_too_wide
from tests.drawing import SPACE, STRATEGIES, drawn
from tests.families.refusing import refuses

each_dtype = pytest.mark.parametrize("dtype", DTYPES)
each_style = pytest.mark.parametrize("style", ["colwise", "rowwise"])


def case_of(**fields: Any) -> EmbeddingCase:
    """Three ranks share 7 ids as 3, 3 and 1, or 5 features as 2, 2 and 1."""
    fields = {"world_size": 3, "style": "rowwise", "leading": (4, 6), "num_embeddings": 7, "embedding_dim": 5, **fields}
    return EmbeddingCase(**fields)


def counts_of(case: EmbeddingCase) -> torch.Tensor:
    """n_v of draw 0, (V,)."""
    return torch.bincount(draw(case, 0)["ids"].flatten().long(), minlength=case.num_embeddings)


# ------------------------------------------------------------------------------------------------
# The case


test_error_for_an_invalid_embedding_case_names_the_invalid_field = refuses(
    case_of,
    ({"leading": (1, 1, 1, 1)}, r"leading must have at most 3 dims of at least 1, got \(1, 1, 1, 1\)"),
    ({"leading": (0,)}, r"leading must have at most 3 dims of at least 1, got \(0,\)"),
    ({"num_embeddings": 0}, r"num_embeddings must be in 1\.\.4096, got 0"),
    ({"padding_idx": 7}, r"padding_idx must be in -1\.\.6, got 7"),
    ({"requires_grad": ("ids",)}, r"requires_grad must be one of \(\), \('weight',\), got \('ids',\)"),
    ({"output_layout": "partial(sum)"}, r"output_layout must be replicate or shard\(DIM\), got partial"),
    ({"input_layout": "shard(2)"}, "ids: "),
    ({"input_layout": "shard(0)"}, r"ids of shape \(4, 6\) have uneven shards .*: set ids_is_dtensor=True"),
)


def test_edge_ids_are_the_first_and_last_id_of_each_vocabulary_shard() -> None:
    assert case_of().edge_ids() == (0, 2, 3, 5, 6)
    assert case_of(padding_idx=4).edge_ids() == (0, 2, 3, 4, 5, 6)
    assert case_of(num_embeddings=2).edge_ids() == (0, 1)


@pytest.mark.parametrize(("num_embeddings", "expected"), [(2, True), (4, True), (5, False), (6, False)])
def test_small_vocabulary_can_leave_the_last_rank_without_ids(num_embeddings: int, *, expected: bool) -> None:
    assert has_empty_part(case_of(num_embeddings=num_embeddings)) is expected


# ------------------------------------------------------------------------------------------------
# Its values


@cache
def drawn_cases(style: str) -> tuple[EmbeddingCase, ...]:
    return tuple(drawn(STRATEGIES[f"{style}_embedding"](SPACE), 150))  # type: ignore[arg-type]


@each_style
def test_drawn_ids_include_both_ids_beside_every_shard_boundary(style: str) -> None:
    seen = []
    for case in drawn_cases(style):
        edges = [shard_bounds(case.num_embeddings, case.world_size, rank)[0] for rank in range(1, case.world_size)]
        both = {side for edge in edges if edge < case.num_embeddings for side in (edge - 1, edge)}
        for mode, seed in case.values if both else ():
            ids = draw_ids(case, mode, seed)
            seen.append(len(ids) >= len(case.edge_ids()))
            assert not seen[-1] or both <= set(ids.tolist())

    assert sum(seen) > 0.5 * len(seen)


def test_two_drawn_ids_are_neighbours_and_reach_every_edge_over_many_seeds() -> None:
    case = case_of(leading=(2,))
    pairs = [set(draw_ids(case, "dense", seed).tolist()) for seed in range(60)]

    assert set.union(*pairs) == set(case.edge_ids())
    assert {2, 3} in pairs and {5, 6} in pairs


def test_some_drawn_ids_occur_more_than_once() -> None:
    assert int(counts_of(case_of()).max()) >= 5
    assert int(counts_of(case_of(num_embeddings=1)).max()) == 24


@each_dtype
def test_mode_index_numbers_the_elements_of_the_weight(dtype: str) -> None:
    weight = draw(case_of(dtype=dtype, values=(("index", 9),)), 0)["weight"]

    assert weight.dtype == DTYPES[dtype] and weight.flatten().tolist() == list(range(1, 36))


@pytest.mark.parametrize("num_tokens", [256, 1000])
def test_cotangent_is_zero_for_repeats_of_an_id_that_bfloat16_cannot_add_exactly(num_tokens: int) -> None:
    """256 ones are 2**8; the oracle proves that the sums stay exact."""
    case = case_of(world_size=1, dtype="bfloat16", leading=(num_tokens,), num_embeddings=1)

    assert int((draw(case, 0)["cotangent"][:, 0] != 0).sum()) == 256
    assert expect(case, 0).bits_used == {"grad.weight": 8}


@pytest.mark.parametrize(
    "fields", [{"values": (("real", 3),)}, {"values": (("dense", 3),), "scale_grad_by_freq": True}]
)
def test_bounds_for_often_repeated_ids_are_narrow_enough_to_conclude(fields: dict[str, Any]) -> None:
    """In bfloat16 sixteen of a thousand tokens of one id have a gradient, mostly on the same side of zero."""
    case = case_of(dtype="bfloat16", leading=(1000,), num_embeddings=1, **fields)

    assert int((draw(case, 0)["cotangent"] != 0).any(-1).sum()) == 16
    assert not is_too_wide(expect(case, 0).tensors["grad.weight"])


@pytest.mark.parametrize("misfit", MISFITS)
def test_case_that_must_be_refused_has_exactly_one_kind_of_invalid_input(misfit: str) -> None:
    case = RefusedEmbeddingCase(world_size=2, style="rowwise", leading=(5,), num_embeddings=4, misfit=misfit)
    ids = draw(case, 0)["ids"]
    outside = ((ids < 0) | (ids >= 4)).sum()

    assert case.refusal.endswith(misfit)
    assert int(outside) == (misfit in ("above", "below"))
    assert ids.dtype == (torch.float32 if misfit == "dtype" else torch.int64)


# ------------------------------------------------------------------------------------------------
# The oracle


def test_gradient_row_has_a_bound_only_if_its_id_occurs_more_than_once() -> None:
    case = case_of(leading=(9,), padding_idx=3, values=(("real", 1),))
    counts, allowed = counts_of(case), expect(case, 0).tensors["grad.weight"].allowed
    counts[3] = 0

    assert allowed is not None and {bool(count > 1) for count in counts} == {False, True}
    for count, row in zip(counts.tolist(), allowed, strict=True):
        assert bool((row > 0).all()) == (count > 1)


def test_scaling_a_gradient_by_a_power_of_two_adds_no_rounding_to_its_bound() -> None:
    ids, cotangent = torch.tensor([0, 0]), torch.tensor([[3.0], [5.0]])
    case = EmbeddingCase(world_size=1, style="rowwise", leading=(2,))
    plain, halved = (
        bound_gradient(each, ids, cotangent, TORCH_CPU["float32"])
        for each in (case, replace(case, scale_grad_by_freq=True))
    )

    assert plain.value.item() == 8 and halved.value.item() == 4
    assert halved.allowed.item() == pytest.approx(plain.allowed.item() / 2)


@pytest.mark.parametrize(
    "change",
    [
        lambda ids, cotangent: (ids.roll(1), cotangent),
        lambda ids, cotangent: (ids, torch.cat([cotangent[:-1], 0 * cotangent[-1:]])),
        lambda ids, cotangent: (ids, torch.cat([cotangent[:-1], 2 * cotangent[-1:]])),
    ],
    ids=["other ids", "a token missing", "a token doubled"],
)
@each_dtype
def test_wrong_gradient_of_an_embedding_is_beyond_the_bound(dtype: str, change: Callable[..., Any]) -> None:
    case = case_of(dtype=dtype, values=(("real", 4),))
    given = draw(case, 0)
    ids, cotangent = given["ids"].flatten(), given["cotangent"].reshape(-1, 5)
    right, wrong = (
        bound_gradient(case, *pair, TORCH_CPU[dtype]) for pair in ((ids, cotangent), change(ids, cotangent))
    )

    assert bool(((wrong.value - right.value).abs() > right.allowed).any())


@pytest.mark.ranks
def test_rowwise_embedding_equals_colwise_embedding(pool: Pool) -> None:
    case = case_of(output_layout="shard(1)", leading=(2, 6), values=(("dense", 0), ("index", 1), ("real", 3)))
    right = {name: tensor for name, tensor in case.tensors.items() if tensor.is_answered}
    assert right.keys() == {"output", "param.weight", "grad.weight"}

    replies = {style: pool.run(f"{style}_embedding", replace(case, style=style)) for style in STYLES}
    for index, (name, tensor) in itertools.product(range(3), right.items()):
        by_rows, by_columns = (
            put_together(
                {rank: reply.answers[index].tensors for rank, reply in enumerate(replies[style])},
                name, tensor.shape, case.mesh_shape,
            )
            for style in STYLES
        )  # fmt: skip
        assert by_rows is not None and by_columns is not None
        assert torch.equal(by_rows, by_columns), (name, case.values[index])


# ------------------------------------------------------------------------------------------------
# The collectives


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"style": "rowwise"}, ["all_reduce of 480"]),
        ({"style": "rowwise", "output_layout": "shard(1)"}, ["reduce_scatter of 480", "backward all_gather of 160"]),
        ({"style": "rowwise", "output_layout": "shard(2)"}, ["reduce_scatter of 576", "backward all_gather of 192"]),
        ({"style": "colwise"}, ["all_gather of 192"]),
        ({"style": "colwise", "output_layout": "shard(2)"}, []),
        ({"style": "colwise", "output_layout": "shard(1)"}, ["all_to_all of 192", "backward all_to_all of 192"]),
        ({"style": "colwise", "output_layout": "shard(2)", "input_layout": "shard(1)"}, ["all_gather of 64"]),
        (
            {"style": "colwise", "output_layout": "shard(2)", "input_layout": "shard(1)", "ids_dtype": "int32"},
            ["all_gather of 32"],
        ),
    ],
)
def test_embedding_documents_the_collectives_of_its_layouts(fields: dict[str, Any], expected: list[str]) -> None:
    """Output (4, 6, 5) in float32, padded to 6 features where these are shared by three ranks; 24 ids."""
    calls = [str(call) for call in expected_collectives(case_of(**fields), 1)][1:]  # without the weight's distribution

    assert calls == [f"{'' if 'backward' in text else 'forward '}{text} bytes" for text in expected]
