"""A batch that is divided among the ranks: right reductions of gradients pass, and a missing one is named."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from equivtest.base import limits
from equivtest.cases.case import from_code, from_data, to_data
from equivtest.cases.values import draw
from equivtest.errors import Misuse
from equivtest.module import ids, module_property, targets
from equivtest.oracle import expect
from equivtest.programs.case import ModuleCase
from equivtest.property import Property, Space, resolved
from equivtest.ranks.pool import Pool
from equivtest.search.chunks import Chunk, chunk_cases
from equivtest.search.known import KnownFailures
from equivtest.search.search import Findings, Target, search
from equivtest.verdicts.judging import check, judge
from equivtest.verdicts.verdict import ValueMismatch
from tests.drawing import SPACE, drawn, smallest

HERE = "tests.programs.batch:"
SHAPES = ((2, 3), (5, 3))
MEAN, SUM = "mean of parts", "sum of parts"
WRONG_GRADIENT = ("gradients_equal_unsharded", "value")


def case_of(build: str = "mlp", parallelize: str = "ddp", **fields: Any) -> ModuleCase:
    """Five rows on two ranks, three of them on the first, unless said otherwise."""
    fields = {"world_size": 2, "x_shape": (5, 3), "batch": MEAN} | fields
    return ModuleCase(build=HERE + build, parallelize=HERE + parallelize, **fields)


def claimed(build: str, parallelize: str, **given: Any) -> Property:
    """A property of it; no module may hold one, or pytest would run it."""
    return module_property(HERE + build, HERE + parallelize, SHAPES, **given)


def searched(prop: Property, pool: Pool, directory: Path, world_size: int = 2, only: Target | None = None) -> Findings:
    """Searches five cases or more.  With `only`, the search ends at the first case with this failure."""
    chunk = Chunk(world_size, ("float32", "bfloat16"), 0, 5)
    return search(prop, chunk, pool, KnownFailures(), directory, only=only, is_enough=lambda case: True)


def failing(found: Findings) -> set[tuple[str, str]]:
    assert not found.misuse and found.records
    verdicts = {verdict for record in found.records for verdict in record.verdicts.items()}
    return {(claim, kind) for claim, kind in verdicts if kind not in ("holds", "skipped", "inconclusive")}


@pytest.mark.ranks
@pytest.mark.parametrize(
    "parallelize",
    [
        "ddp_without_synchronization",
        "ddp_with_a_hook_that_reduces_nothing",
        "ddp_that_ignores_a_parameter",
        "fsdp2_that_reduces_nothing",
    ],
)
def test_unreduced_gradients_of_a_divided_batch_are_rejected(pool: Pool, tmp_path: Path, parallelize: str) -> None:
    """One line is enough: `parallelize` shows that torch reduces gradients."""
    found = failing(searched(claimed("mlp", parallelize), pool, tmp_path, only=WRONG_GRADIENT))

    assert WRONG_GRADIENT in found


@pytest.mark.ranks
def test_gradients_compressed_to_float16_are_rejected(pool: Pool) -> None:
    """float16 is off by up to 2**-11 of a gradient, far beyond the bound of float32."""
    verdicts = judge("module", case_of("curved", "ddp_compressed_to_float16", values=(("real", 0),)), pool)

    assert ("gradients_equal_unsharded", "value") in {(verdict.claim, verdict.kind) for verdict in verdicts}


@pytest.mark.ranks
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize(
    ("build", "parallelize"),
    [
        *(("mlp", name) for name in ("ddp", "ddp_of_layers", "fsdp2", "fsdp2_of_layers", "replicated")),
        *(("curved", name) for name in ("ddp", "fsdp2")),
    ],
)
def test_right_programs_that_average_gradients_pass(
    pool: Pool, tmp_path: Path, build: str, parallelize: str, world_size: int
) -> None:
    found = searched(claimed(build, parallelize), pool, tmp_path, world_size)

    assert failing(found) == set() and len(found.records) >= 5
    assert {record.case["fields"]["batch"] for record in found.records} == {MEAN}


@pytest.mark.ranks
def test_ranks_that_shard_in_pairs_divide_the_batch_among_all(pool: Pool) -> None:
    """FullyShardedDataParallel reduces gradients among the ranks that shard, and then among equal shards."""
    flat = "equivtest.programs.examples.flat:"
    parallelize = f"{flat}flat_sharded(strategy='FULL_SHARD', by_name=True, setting='hybrid')"
    prop = resolved(
        module_property(f"{flat}partly_frozen_block", parallelize, ((5, 2),)), pool, Space((4,), SPACE.dtypes)
    )

    assert {case.batch for case in chunk_cases(prop, Chunk(4, SPACE.dtypes, 0, 2)) if isinstance(case, ModuleCase)} == {
        MEAN
    }


@pytest.mark.ranks
@pytest.mark.parametrize("parallelize", ["ddp_that_sums", "fsdp2_that_sums"])
def test_summed_gradients_are_rejected_unless_declared(pool: Pool, tmp_path: Path, parallelize: str) -> None:
    """DDP and fully_shard document that they average."""
    unsaid = searched(claimed("mlp", parallelize), pool, tmp_path, only=WRONG_GRADIENT)
    said = searched(claimed("mlp", parallelize, batch=SUM), pool, tmp_path)

    assert failing(unsaid) == {WRONG_GRADIENT} and failing(said) == set() and len(said.records) >= 5


@pytest.mark.ranks
def test_averaged_gradients_are_rejected_if_sums_are_declared(pool: Pool) -> None:
    with pytest.raises(ValueMismatch, match=r"module: grad\.0\.weight differs from the oracle"):
        check("module", case_of(batch=SUM), pool)


@pytest.mark.ranks
def test_mixed_precision_declines_dtypes_other_than_its_output_dtype(pool: Pool) -> None:
    kinds = {
        dtype: {
            verdict.kind
            for verdict in judge("module", case_of(parallelize="fsdp2_that_gives_float32", dtype=dtype), pool)
        }
        for dtype in ("float32", "float64", "bfloat16")
    }

    assert kinds == {"float32": {"holds"}, "float64": {"declined"}, "bfloat16": {"declined"}}


@pytest.mark.ranks
def test_mixed_precision_is_judged_if_the_reference_has_its_output_dtype(pool: Pool) -> None:
    case = case_of("widened", "fsdp2_that_gives_float32", dtype="bfloat16")

    assert {verdict.kind for verdict in judge("module", case, pool)} == {"holds"}


@pytest.mark.ranks
def test_ddp_bucket_that_waits_for_a_missing_gradient_is_rejected(pool: Pool) -> None:
    """DistributedDataParallel is silent until the next forward unless it is configured to find unused parameters."""
    with pytest.raises(ValueMismatch, match=r"module: grad\.used\.weight differs from the oracle"):
        check("module", case_of("spare", "ddp"), pool)


@pytest.mark.ranks
@pytest.mark.parametrize("parallelize", ["ddp_of_layers", "fsdp2"])
def test_right_program_with_an_unused_parameter_passes(pool: Pool, parallelize: str) -> None:
    assert {verdict.kind for verdict in check("module", case_of("spare", parallelize), pool)} == {"holds"}


@pytest.mark.ranks
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_number_returned_by_each_rank_is_judged_as_one_row_of_the_output(pool: Pool, world_size: int) -> None:
    case = case_of("one_number", world_size=world_size, x_shape=(5,))

    assert case.shapes()["output"] == (world_size,)
    assert {verdict.kind for verdict in check("module", case, pool)} == {"holds"}


@pytest.mark.ranks
def test_module_that_mixes_rows_passes_if_each_rank_mixes_only_its_own_rows(pool: Pool) -> None:
    case = case_of("ranked", world_size=3, dtype="float64", values=(("real", 0),))

    assert {verdict.kind for verdict in check("module", case, pool)} == {"holds"}


@pytest.mark.ranks
def test_gradients_on_seven_ranks_may_be_multiplied_by_a_rounded_seventh(pool: Pool) -> None:
    """In float32 this error is too large for equality."""
    case = case_of(world_size=7, x_shape=(7, 3))

    assert {verdict.kind for verdict in check("module", case, pool)} == {"holds"}
    assert expect(case, 0).tensors["grad.0.weight"].allowed is not None


@pytest.mark.parametrize(("batch", "divisor"), [(MEAN, 3), (SUM, 1)])
def test_reference_runs_the_unsharded_module_on_each_part_of_the_batch(batch: str, divisor: int) -> None:
    case = case_of("ranked", batch=batch, world_size=3, dtype="float64", values=(("real", 0),))
    given = draw(case, 0)
    found = expect(case, 0).tensors
    weight = given["linear.weight"].clone().requires_grad_()
    x, outputs = given["x"].clone().requires_grad_(), []
    for rows in (slice(0, 2), slice(2, 4), slice(4, 5)):
        outputs.append(torch.nn.functional.linear(x[rows], weight, given["linear.bias"]).softmax(0))
        outputs[-1].backward(given["cotangent"][rows], retain_graph=True)

    assert weight.grad is not None and x.grad is not None
    assert torch.allclose(found["output"].value, torch.cat(outputs).detach(), rtol=1e-12)
    assert torch.allclose(found["grad.x"].value, x.grad, rtol=1e-12, atol=1e-15)
    assert torch.allclose(found["grad.linear.weight"].value, weight.grad / divisor, rtol=1e-12, atol=1e-15)


def test_gradient_sum_that_the_dtype_cannot_represent_raises_misuse() -> None:
    """One part of sixty rows would."""
    with pytest.raises(Misuse, match="bfloat16 is exact only up to 256"):
        expect(case_of(x_shape=(36, 3), dtype="bfloat16", world_size=2, batch=SUM), 0)


@pytest.mark.parametrize(
    ("build", "fields", "message"),
    [
        (
            "mlp",
            {"x_shape": (1, 3)},
            r"cannot divide x of shape \(1, 3\) among 2 ranks .* take one of 2 rows, such as \(2, 3\)",
        ),
        ("mlp", {"x_shape": (4, 3), "world_size": 3}, r"torch.chunk cannot divide x of shape \(4, 3\) among 3 ranks"),
        ("mlp", {"x_shape": ()}, r"cannot divide x of shape \(\) among 2 ranks"),
        (
            "doubled",
            {},
            r"outputs have the shapes \(6, 3\), \(4, 3\), .*: take shapes whose rows the ranks divide evenly",
        ),
        (
            "mlp",
            {"batch": "parts"},
            "batch must be one of whole, mean of parts, sum of parts, parts of the whole, got 'parts'",
        ),
    ],
)
def test_invalid_divided_case_raises_misuse(build: str, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(Misuse, match=message):
        case_of(build, **fields)


def test_shape_that_gives_a_rank_no_rows_is_not_drawn() -> None:
    prop = module_property(HERE + "mlp", HERE + "ddp", ((1, 3), (2, 3), (4, 3), (5, 3)), batch=MEAN)
    shapes = {
        (case.world_size, case.arguments.x_shape) for case in drawn(prop.cases(Space((1, 2, 3, 4), ("float32",))), 100)
    }

    assert shapes == {
        *((1, shape) for shape in [(1, 3), (2, 3), (4, 3), (5, 3)]),
        *((2, shape) for shape in [(2, 3), (4, 3), (5, 3)]),
        *((3, shape) for shape in [(5, 3)]),
        *((4, shape) for shape in [(4, 3)]),
    }


def test_first_shape_gets_more_rows_if_no_shape_has_a_row_for_each_rank() -> None:
    prop = module_property(HERE + "mlp", HERE + "ddp", ((1, 3), (4, 3)), batch=MEAN)

    assert {case.arguments.x_shape for case in drawn(prop.cases(Space((8,), ("float32",))), 50)} == {(8, 3), (15, 3)}


def test_each_micro_batch_of_a_rank_gets_a_row_if_no_size_has_enough() -> None:
    prop = module_property(
        "equivtest.programs.examples.next_token:next_token",
        "equivtest.programs.examples.plans:fully_sharded",
        inputs={"ids": ids(7, ("batch", "seq")), "targets": targets(7, ("batch", "seq"))},
        sizes={"batch": (2, 3), "seq": (2,)},
        batch="parts of the whole",
        optimizer="equivtest.programs.examples.token_mean:adamw",
        step="equivtest.programs.examples.token_mean:token_mean",
        micro_batches=2,
    )
    cases = drawn(prop.cases(Space((4,), ("float64",))), 50)

    assert {dict(case.arguments.sizes)["batch"] for case in cases} == {8, 15}


@pytest.mark.ranks
def test_batch_that_no_number_of_rows_divides_raises_misuse(pool: Pool, tmp_path: Path) -> None:
    prop = module_property(HERE + "mlp", HERE + "ddp", ((), (3,)), batch=MEAN)
    found = searched(prop, pool, tmp_path, world_size=4)

    assert found.misuse.startswith("the ranks can divide no x of shape (), (3,): torch.chunk cannot divide x of")
    assert "\n" not in found.misuse


@pytest.mark.ranks
def test_ranks_that_disagree_on_reducing_gradients_raise_misuse(pool: Pool, tmp_path: Path) -> None:
    found = searched(claimed("mlp", "sharded_on_one_rank_alone"), pool, tmp_path)

    assert "makes a module that reduces its gradients only on ranks [0] of 2" in found.misuse


@pytest.mark.ranks
def test_batch_probe_that_cannot_import_the_program_raises_misuse(pool: Pool) -> None:
    with pytest.raises(Misuse, match="batch:missing' cannot be imported"):
        resolved(claimed("mlp", "missing"), pool)


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("parallelize", "told", "detail"),
    [
        (
            "raises_on_the_last_rank",
            r"rank 1 of 2 raised RuntimeError: no room for the shards: fix that\.",
            r'tests/programs/batch.py", line \d+, in raises_on_the_last_rank',
        ),
        ("hangs", "rank 0 of 2 did not answer", r'tests/programs/batch.py", line \d+ in hangs'),
        ("ends_the_last_rank", "rank 1 of 2 ended", "its output:\n  no library to load"),
    ],
)
def test_unknown_reduction_of_gradients_raises_misuse(pool: Pool, parallelize: str, told: str, detail: str) -> None:
    with pytest.raises(Misuse, match=f"{told}.*batch='whole'.*\n") as caught:
        resolved(claimed("mlp", parallelize, limit_s=5.0), pool)
    assert re.search(detail, str(caught.value).partition("\n")[2])


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("given", "batch"), [({}, MEAN), ({"batch": "whole"}, "whole"), ({"batch": SUM}, SUM)], ids=["none", "whole", "sum"]
)
def test_declared_batch_overrides_the_probed_batch(pool: Pool, given: dict[str, Any], batch: str) -> None:
    prop = resolved(claimed("mlp", "fsdp2", **given), pool)

    assert {case.batch for case in chunk_cases(prop, Chunk(2, limits.DTYPES, 0, 5))} == {batch}  # type: ignore[attr-defined]
    assert resolved(prop, pool) is prop


@pytest.mark.ranks
def test_batch_stays_whole_if_data_parallelism_covers_only_some_ranks(pool: Pool) -> None:
    space = Space((4,), limits.DTYPES)
    prop = resolved(claimed("mlp", "fsdp2_over_tensor_parallelism"), pool, space)

    assert {case.batch for case in chunk_cases(prop, Chunk(4, limits.DTYPES, 0, 5))} == {"whole"}  # type: ignore[attr-defined]


@pytest.mark.ranks
def test_batch_probe_of_an_unsupported_parallelization_raises_no_error(pool: Pool) -> None:
    """No dtype gets an answer if torch lacks a function that `parallelize` uses."""
    prop = claimed("mlp", "lacking", optimizer="equivtest.programs.examples.mixture:sgd")

    assert resolved(prop, pool, Space((2,), ("bfloat16", "float32"))).resolve is None


@pytest.mark.ranks
def test_batch_is_probed_only_once(monkeypatch: pytest.MonkeyPatch, pool: Pool) -> None:
    prop = claimed("mlp", "ddp_of_layers")
    resolved(prop, pool)
    monkeypatch.setattr(pool, "run", None)

    assert resolved(prop, pool).resolve is None


@pytest.mark.ranks
def test_dtensor_output_of_a_divided_batch_raises_misuse(pool: Pool) -> None:
    with pytest.raises(
        Misuse, match=r"each rank must return its own rows as a plain tensor, got .*: call to_local on it"
    ):
        judge("module", case_of(parallelize="dtensor_of_rows"), pool)


def test_repr_of_a_divided_case_is_code_that_makes_an_equal_case() -> None:
    assert from_code(repr(case_of(batch=SUM))) == case_of(batch=SUM)


def test_unknown_batch_raises_misuse() -> None:
    with pytest.raises(Misuse, match=r"batch must be one of .* or None, got 'mean'"):
        module_property(HERE + "mlp", HERE + "ddp", SHAPES, batch="mean")


def test_divided_batch_shrinks_to_one_row_and_survives_json() -> None:
    names = {"build": "torch.nn:Identity", "parallelize": "mine:whole", "batch": MEAN}
    shapes = ((1,), (64,), (64, 2))
    strategy = module_property(names["build"], names["parallelize"], shapes, batch=MEAN).cases(SPACE)

    assert smallest(strategy) == ModuleCase(world_size=1, **names)
    assert all(from_data(to_data(case)) == case for case in drawn(strategy, 20))
