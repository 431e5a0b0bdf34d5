"""Plain tensors as parameters: the elements that each rank holds are read off, and wrong ones are named."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from equivtest.errors import Misuse
from equivtest.module import module_property
from equivtest.programs.case import ModuleCase
from equivtest.programs.run.tracing import NONE, code_words, read_places
from equivtest.ranks.pool import Pool
from equivtest.search.audit import audit
from equivtest.search.chunks import Chunk
from equivtest.search.known import KnownFailures
from equivtest.search.search import search
from equivtest.tensors import DTYPES
from equivtest.verdicts.judging import check, judge
from equivtest.verdicts.verdict import ClaimFailed, ShapeMismatch, ValueMismatch

HERE = "tests.programs.held:"
FSDP1 = ("fsdp1", "fsdp1_flat", "fsdp1_by_layer")


def case_of(build: str, parallelize: str, **fields: Any) -> ModuleCase:
    """Two ranks, unless said otherwise; a batch of two rows, or of two for each rank."""
    world_size = fields.setdefault("world_size", 2)
    divided = {"batch": "mean of parts", "x_shape": (2 * world_size, 3)}
    own = divided if parallelize.startswith("fsdp1") else {"x_shape": (2 if build == "mlp" else 1, 3)}
    fields = {"values": (("dense", 0), ("dense", 1)), "repeats": True} | own | fields
    return ModuleCase(build=HERE + build, parallelize=HERE + parallelize, **fields)


def values_of(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    """Returns the values of each parameter if a rank holds all of it."""
    return {name: torch.arange(math.prod(shape)).reshape(shape) for name, shape in shapes.items()}


SHAPES = {"weight": (4, 3), "bias": (4,)}


@pytest.mark.ranks
@pytest.mark.parametrize(("world_size", "dtype"), [(1, "float32"), (2, "float64"), (3, "bfloat16"), (4, "float16")])
@pytest.mark.parametrize(
    ("build", "parallelize"),
    [
        ("mlp", "megatron"),
        ("mlp", "padded"),
        ("mlp", "under_other_names"),
        ("mixer", "heads"),
        ("separate", "merged"),
        *(("mlp", name) for name in FSDP1),
    ],
)
def test_right_program_with_plain_shards_passes(
    pool: Pool, build: str, parallelize: str, world_size: int, dtype: str
) -> None:
    case = case_of(build, parallelize, world_size=world_size, dtype=dtype)

    assert {verdict.kind for verdict in check("module", case, pool)} == {"holds"}


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("parallelize", "error", "message"),
    [
        ("swapped", ValueMismatch, r"output differs from the oracle(.|\n)*param\.0\.weight, .* agree"),
        ("stale", ShapeMismatch, r"param\.2\.weight has(.|\n)*8 of 16 elements are on no rank, the first is \(0, 4\)"),
        (
            "stale_later",
            ValueMismatch,
            r"param\.2\.weight differs(.|\n)*rank 1 of 2, .*global \(0, 4\) of(.|\n)*rank 1 o",
        ),
        (
            "left_over",
            ShapeMismatch,
            r"param\.0\.weight has(.|\n)*6 of 24 elements are on no rank, the first is \(6, 0\)",
        ),
        ("drifting", ValueMismatch, r"grad\.2\.bias differs(.|\n)*by elements(.|\n)*rank 1 only"),
        ("fsdp1_unreduced", ValueMismatch, r"grad\.0\.weight differs(.|\n)*global \(\d, \d\) of \(8, 3\), by elements"),
    ],
)
def test_message_names_the_wrong_parameter_of_a_program_with_plain_shards(
    pool: Pool, parallelize: str, error: type[ClaimFailed], message: str
) -> None:
    with pytest.raises(error, match=message):
        check("module", case_of("mlp", parallelize), pool)


@pytest.mark.ranks
@pytest.mark.parametrize("parallelize", ["drifting", "fsdp1_unreduced"])
def test_wrong_program_with_plain_shards_fails_on_three_ranks(pool: Pool, parallelize: str) -> None:
    with pytest.raises(ValueMismatch, match="claim     gradients_equal_unsharded"):
        check("module", case_of("mlp", parallelize, world_size=3), pool)


@pytest.mark.ranks
def test_replicas_of_an_element_must_have_equal_bits(pool: Pool) -> None:
    verdicts = {verdict.claim: verdict for verdict in judge("module", case_of("mlp", "drifting"), pool)}
    mismatch = verdicts["agrees_on_all_ranks"].judgement.mismatches[0]

    assert (mismatch.tensor, mismatch.rank, mismatch.extent) == ("grad.2.bias", 1, "ranks 0 and 1")
    assert (mismatch.local_index, mismatch.global_index) == ((0,), (0,))


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("parallelize", "message"),
    [
        (
            "scaled",
            r"cannot find the place of 2 of the 2 local elements of 2\.bias, .* computed from values or .*",
        ),
        (
            "by_size",
            r"cannot find the place of .* elements of 0\.weight, .* Judge\(placed='package\.module",
        ),
        ("other_forms", "made tensors with other names or shapes when it was called again: say what each rank holds"),
    ],
)
def test_elements_that_tracing_cannot_locate_raise_misuse(pool: Pool, parallelize: str, message: str) -> None:
    with pytest.raises(Misuse, match=message):
        judge("module", case_of("mlp", parallelize), pool)


@pytest.mark.ranks
def test_layout_declared_by_the_user_function_is_used(pool: Pool) -> None:
    case = case_of("mlp", "megatron", placed=HERE + "rows_and_columns", world_size=3)

    assert {verdict.kind for verdict in check("module", case, pool)} == {"holds"}


@pytest.mark.ranks
def test_wrong_layout_declared_by_the_user_function_raises_value_mismatch(pool: Pool) -> None:
    with pytest.raises(
        ValueMismatch, match=r"param\.0\.weight differs(.|\n)*local \(0, 0\), global \(3, 0\) of \(8, 3\)"
    ):
        check("module", case_of("mlp", "megatron", placed=HERE + "rows_in_reverse"), pool)


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("placed", "message"),
    [
        ("beyond", r"param\.0\.weight: indices must be int64 of shape \(4, 3\) with values 0 to 23, got .* 13 to 24"),
        ("indices_alone", r"for parameter 0\.weight, must return None or a tensor and its indices, got Tensor"),
        (
            "too_few",
            r"int64 of the tensor's shape \(4, 3\), with -1 for an element that is not of 0\.weight, got .* \(1, 3\)",
        ),
        ("missing", "placed 'tests.programs.held:missing' cannot be imported"),
        ("mlp", r"placed .* must take \(module, name\), but takes \(\)"),
    ],
)
def test_invalid_layout_declared_by_the_user_function_raises_misuse(pool: Pool, placed: str, message: str) -> None:
    with pytest.raises(Misuse, match=message):
        judge("module", case_of("mlp", "megatron", placed=HERE + placed), pool)


@pytest.mark.ranks
def test_error_for_a_renamed_parameter_suggests_the_nearest_name(pool: Pool) -> None:
    message = r"has no parameter 0\.weight; the most similar of its 5 names is 0\.2\.weight: say what each rank holds"
    with pytest.raises(Misuse, match=message):
        judge("module", case_of("mlp", "under_other_names", placed=HERE + "nothing_said"), pool)


@pytest.mark.ranks
@pytest.mark.parametrize("parallelize", ["megatron", "fsdp1_flat"])
def test_plain_shards_are_judged_by_parts_on_real_values(pool: Pool, parallelize: str) -> None:
    case = case_of("mlp", parallelize, dtype="bfloat16", by_parts=True, values=(("real", 0), ("real", 1)))

    assert {verdict.kind for verdict in check("module", case, pool)} <= {"holds", "inconclusive"}
    assert "holds" in {verdict.kind for verdict in check("module", case, pool)}


@pytest.mark.ranks
@pytest.mark.parametrize(("build", "parallelize"), [("mlp", "megatron"), ("mlp", "fsdp1_flat"), ("separate", "merged")])
def test_property_of_plain_shards_passes_its_claims_and_its_audit(
    pool: Pool, tmp_path: Path, build: str, parallelize: str
) -> None:
    prop = module_property(HERE + build, HERE + parallelize, ((1, 3), (2, 3), (3, 3), (4, 3)))
    found = search(prop, Chunk(2, ("float32", "bfloat16"), 0, 8), pool, KnownFailures(), tmp_path)
    audited = audit(prop, pool, KnownFailures(), (2,), ("float32",))

    assert not found.misuse and found.records and not found.failures
    assert not audited.problem and not audited.unseen


@pytest.mark.ranks
@pytest.mark.parametrize("parallelize", ["megatron", "fsdp1", "fsdp1_flat"])
def test_training_steps_on_plain_shards_are_judged_by_element(pool: Pool, parallelize: str) -> None:
    steps = {"optimizer": HERE + "adamw", "steps": 2, "values": (("real", 0),)}
    verdicts = {verdict.claim: verdict.kind for verdict in check("module", case_of("mlp", parallelize, **steps), pool)}

    assert set(verdicts.values()) == {"holds"} and "trains_like_unsharded" in verdicts


@pytest.mark.ranks
@pytest.mark.parametrize("parallelize", ["megatron", "fsdp1", "fsdp1_flat"])
def test_clipping_by_the_norm_of_one_ranks_shards_raises_misuse(pool: Pool, parallelize: str) -> None:
    steps = {"optimizer": HERE + "adamw", "max_norm": 0.5, "values": (("real", 0),)}
    with pytest.raises(Misuse, match="clip_grad_norm_ treats it as the whole parameter: write a step that clips"):
        judge("module", case_of("mlp", parallelize, **steps), pool)


@pytest.mark.parametrize("num", [1, 16, 1016, 1017, 5000])
def test_values_used_for_tracing_are_distinct_and_exact_in_every_dtype(num: int) -> None:
    words = code_words(num)

    assert len(set(zip(*words.tolist(), strict=True))) == num
    assert all(torch.equal(words.to(dtype).double(), words) for dtype in DTYPES.values())
    assert all(bool((sign * run > 0).all()) for sign, run in zip((1, -1, 1), words, strict=False))
    assert 255 ** len(words) >= 64 * num


def test_tracing_finds_elements_that_were_moved_or_padded() -> None:
    flat = lambda whole: torch.cat([whole["bias"], torch.full((2,), 42.0), whole["weight"].mT.flatten()])  # noqa: E731
    places = read_places(SHAPES, lambda whole: {"flat": flat(whole), "own": torch.randn(3)}, "it")

    assert {name: [place.holder for place in found] for name, found in places.items()} == {
        "weight": ["flat"],
        "bias": ["flat"],
    }
    right = values_of(SHAPES)
    assert places["weight"][0].indices.tolist() == [NONE] * 6 + right["weight"].mT.flatten().tolist()
    assert places["bias"][0].indices.tolist() == [*right["bias"].tolist(), *[NONE] * 14]


def test_tracing_finds_both_copies_of_an_element_in_two_tensors() -> None:
    places = read_places(SHAPES, lambda whole: {"one": whole["weight"], "two": whole["weight"][:1]}, "it")

    assert [place.holder for place in places["weight"]] == ["one", "two"]
    assert torch.equal(places["weight"][1].indices, torch.arange(3).reshape(1, 3))
    assert places["bias"] == ()


@pytest.mark.parametrize(
    "compute",
    [
        lambda weight: weight * 2,
        lambda weight: -weight,
        lambda weight: weight + 1,
        lambda weight: weight.abs(),
        lambda weight: weight.flip(0) + weight,
        lambda weight: torch.where(weight == weight.max(), weight + 0.5, weight),
        lambda weight: weight.round(decimals=-1),
    ],
)
def test_tracing_a_value_that_was_computed_from_a_parameter_raises_misuse(compute: Any) -> None:
    with pytest.raises(Misuse, match="cannot find the place of"):
        read_places(SHAPES, lambda whole: {"weight": compute(whole["weight"]), "bias": whole["bias"]}, "it")
