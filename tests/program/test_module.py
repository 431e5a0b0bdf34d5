"""Users' modules: right parallelizations pass, and the message names what a wrong one gets wrong."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from equivtest.base import limits
from equivtest.cases.values import draw
from equivtest.errors import Misuse
from equivtest.module import module_property
from equivtest.oracle import expect
from equivtest.programs.case import ModuleCase, call_builder
from equivtest.property import Space, resolved
from equivtest.pytest_plugin.suite import shipped
from equivtest.ranks.pool import Pool
from equivtest.search.chunks import Chunk
from equivtest.search.known import KnownFailures
from equivtest.search.search import search
from equivtest.verdicts.judging import check, judge
from equivtest.verdicts.verdict import RankRaised, ShapeMismatch, ValueMismatch
from tests.drawing import drawn

HERE = "tests.programs.module:"


def case_of(build: str = "mlp", parallelize: str = "tensor_parallel", **fields: Any) -> ModuleCase:
    """Two ranks, an x of two rows, unless said otherwise."""
    fields = {"world_size": 2, "x_shape": (2, 3)} | fields
    return ModuleCase(build=HERE + build, parallelize=HERE + parallelize, **fields)


@pytest.mark.ranks
@pytest.mark.parametrize(("world_size", "dtype"), [(2, "float32"), (3, "float64"), (3, "bfloat16"), (2, "float16")])
@pytest.mark.parametrize(
    ("build", "parallelize"),
    [
        ("mlp", "tensor_parallel"),
        ("mlp", "fsdp2"),
        ("mlp", "ddp"),
        ("mlp", "with_hooks"),
        ("tied", "fsdp2"),
        ("tied", "ddp"),
    ],
)
def test_right_parallel_module_passes(pool: Pool, build: str, parallelize: str, world_size: int, dtype: str) -> None:
    case = case_of(build, parallelize, world_size=world_size, dtype=dtype, values=(("dense", 0), ("dense", 1)))

    assert {verdict.kind for verdict in check("module", case, pool)} == {"holds"}


@pytest.mark.ranks
def test_parallel_module_that_computes_a_different_function_is_rejected(pool: Pool) -> None:
    with pytest.raises(ValueMismatch, match="module: output differs from the oracle"):
        check("module", case_of(parallelize="without_relu"), pool)


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("parallelize", "message"),
    [
        ("sharded_output", "must return its whole output on every rank, got .*Shard.*: redistribute it"),
        ("nothing", "must return the parallel module, got NoneType: return it"),
        ("whole", "no collective ran, forward or backward, on 2 ranks that all have the whole batch"),
        ("misspelt", "the module is not parallel. The plan may name parts that the module does not have"),
        ("marked", "the module is not parallel"),
        ("with_optimizer", "no collective ran, .* If each rank has different rows, pass batch='mean of"),
        ("without_mesh", r"must take \(module, mesh\), but takes .*: too many positional arguments"),
        ("with_aside", "the parallel module must return one tensor, got tuple"),
        ("missing", "parallelize 'tests.programs.module:missing' cannot be imported"),
    ],
)
def test_module_that_cannot_be_judged_raises_misuse(pool: Pool, parallelize: str, message: str) -> None:
    with pytest.raises(Misuse, match=message):
        judge("module", case_of(parallelize=parallelize), pool)


@pytest.mark.ranks
def test_sharded_gradient_of_an_unsharded_parameter_raises_misuse(pool: Pool) -> None:
    with pytest.raises(Misuse, match=r"gradient of weight is a plain tensor .* \(2, 3\), .* \(4, 3\): make the shard"):
        judge("module", case_of("linear", "gradients_in_parts"), pool)


@pytest.mark.ranks
@pytest.mark.parametrize("parallelize", ["ddp_that_finds_unused", "fsdp2", "tensor_parallel_in_part"])
def test_unused_parameter_has_no_gradient(pool: Pool, parallelize: str) -> None:
    case = case_of("spare", parallelize, values=(("dense", 0), ("dense", 1)), repeats=True)

    assert {verdict.kind for verdict in check("module", case, pool)} == {"holds"}


@pytest.mark.ranks
@pytest.mark.parametrize("parallelize", ["gradient_of_the_unused", "gradient_of_the_unused_on_one_rank"])
def test_gradient_of_an_unused_parameter_is_rejected(pool: Pool, parallelize: str) -> None:
    with pytest.raises(ValueMismatch, match=r"module: grad\.spare\.bias differs from the oracle"):
        check("module", case_of("spare", parallelize), pool)


@pytest.mark.ranks
def test_missing_gradient_is_rejected(pool: Pool) -> None:
    message = r"grad\.used\.bias(.|\n)*on this rank \.grad of used\.bias is None(.|\n)*way out   .* has a gradient"
    with pytest.raises(ShapeMismatch, match=message):
        check("module", case_of("spare", "without_a_gradient"), pool)


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("parallelize", "message"),
    [
        (
            "local_columns",
            r"output has shape \(2, 2\), but the unsharded module's output has \(2, 4\): \(2, 2\) is this rank's shard "
            r"along dim 1: gather it \(all_gather, full_tensor\(\) of a DTensor, output_layouts=.*\)\n",
        ),
        ("local_rows", r"\(1, 4\), .* shard along dim 0: .* different rows, pass batch='mean of parts'\n"),
        ("flat", r"\(8,\), but the unsharded module's output has \(2, 4\): return the unsharded module's whole output"),
        ("summed", r"shape \(\), but the unsharded module's output has \(2, 4\): return the unsharded module's whole"),
    ],
)
def test_output_of_a_wrong_shape_fails_and_the_message_names_its_shard(
    pool: Pool, parallelize: str, message: str
) -> None:
    with pytest.raises(RankRaised, match=message):
        check("module", case_of("linear", parallelize), pool)


@pytest.mark.parametrize(
    ("build", "fields", "message"),
    [
        ("missing", {}, "build 'tests.programs.module:missing' cannot be imported"),
        ("no_module", {}, "must give an nn.Module, got int"),
        ("needs_sizes", {}, r"must take \(\), but takes \(.*: missing a required argument"),
        ("named_x", {}, "a parameter must not be called x, the name of an input"),
        ("mlp", {"x_shape": (2, 5)}, r"does not take an x of shape \(2, 5\)"),
        ("mlp", {"x_shape": (0, 3)}, r"x_shape must be at least 1, got \(0, 3\)"),
        ("mlp", {"largest": 2}, "largest must be odd, got 2"),
        ("mlp", {"dtype": "bfloat16", "values": (("real", 0),)}, "must be of float32 or float64, got bfloat16"),
    ],
)
def test_invalid_module_case_raises_misuse(build: str, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(Misuse, match=message):
        case_of(build, **fields)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (case_of("norm"), "native_layer_norm may round"),
        (
            case_of(dtype="bfloat16", largest=7),
            "is exact only up to 256, in 2, at .*: take smaller sizes or leave this dtype out",
        ),
    ],
    ids=["an operation that rounds", "too many bits"],
)
def test_module_case_with_integers_that_could_round_is_refused(case: ModuleCase, message: str) -> None:
    with pytest.raises(Misuse, match=message):
        expect(case, 0)


def test_reference_is_the_unsharded_module() -> None:
    case = case_of("tied")
    x, weight, cotangent = (draw(case, 0)[name].double() for name in ("x", "first.weight", "cotangent"))
    found = expect(case, 0).tensors

    assert set(found) == {"output", "param.first.weight", "grad.x", "grad.first.weight"}
    assert torch.equal(found["output"].value, x @ weight.T @ weight.T)
    assert torch.equal(found["grad.x"].value, cotangent @ weight @ weight)
    assert torch.equal(found["grad.first.weight"].value, cotangent.T @ (x @ weight.T) + (cotangent @ weight).T @ x)


def test_dtype_gets_only_shapes_whose_sums_it_represents_exactly() -> None:
    """bfloat16 holds 256, which sums over sixty rows exceed."""
    prop = module_property(HERE + "mlp", HERE + "tensor_parallel", ((2, 3), (60, 3)))
    cases = drawn(prop.cases(Space((2,), limits.DTYPES)), 200)

    assert {case.arguments.x_shape for case in cases if case.dtype == "bfloat16"} == {(2, 3)}
    assert {case.dtype for case in cases if case.arguments.x_shape == (60, 3)} == {"float32", "float64", "float16"}


def test_naming_the_output_of_a_module_with_one_output_raises_misuse() -> None:
    with pytest.raises(Misuse, match="but has no output at logits: omit outputs, as it returns one tensor"):
        case_of(outputs=("logits",))


@pytest.mark.parametrize(("build", "name"), [("lazy", "weight"), ("with_lazy_buffers", "running_mean")])
def test_lazy_module_raises_misuse(build: str, name: str) -> None:
    with pytest.raises(Misuse, match=f"{build}: {name} has no shape yet: run the module once in build"):
        case_of(build, "whole")


def test_module_that_casts_to_a_fixed_dtype_is_drawn_on_real_values_in_this_dtype() -> None:
    """The proof that integers are exact runs the module in float64, where torch refuses the product."""
    prop = module_property(HERE + "in_float16", HERE + "whole", ((2, 3),))
    cases = drawn(prop.cases(Space((2,), limits.DTYPES)), 20)

    assert {(case.dtype, mode) for case in cases for mode, _ in case.values} == {("float16", "real")}


@pytest.mark.parametrize("x_shapes", [(2, 3), (), 5])
def test_single_shape_in_place_of_a_list_is_refused(x_shapes: Any) -> None:
    with pytest.raises(Misuse, match=r"x_shapes must hold at least one shape, .* got "):
        module_property(HERE + "mlp", HERE + "tensor_parallel", x_shapes)


def test_module_that_rounds_is_drawn_on_real_values() -> None:
    """Real values as a whole, and part by part in 16 bits; integers it would round, too."""
    prop = module_property(HERE + "norm", HERE + "whole", ((2, 3),), conclusive_dtypes=("float64",))
    cases = drawn(prop.cases(Space((2,), limits.DTYPES)), 100)

    assert {case.dtype for case in cases if not case.judge.by_parts} == {"float32", "float64"}
    assert {case.dtype for case in cases if case.judge.by_parts} == {"bfloat16", "float16"}
    assert prop.conclusive_dtypes == ("float64",)
    assert {mode for case in cases for mode, _ in case.values} == {"real"}


@pytest.mark.ranks
def test_every_shipped_program_has_cases_in_each_dtype_in_which_a_conformance_run_must_conclude(pool: Pool) -> None:
    """On the largest world, where results have the most digits."""
    for name in (name for name, prop in shipped().items() if prop.subject == "module"):
        prop = resolved(shipped()[name], pool)
        left_out = prop.left_out(Space((max(prop.among(limits.WORLD_SIZES)),), limits.DTYPES))

        assert not set(left_out) & set(prop.conclusive_dtypes or limits.DTYPES), name


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            "dropout",
            r"with x of shape .*: bernoulli_ draws at random, .*, at .*dropout\.py:\d+, `.*`: judge a module",
        ),
        ("deep", "the roundings of a correct module may add up to more than 0.1 times .*; or judge a smaller part"),
    ],
)
def test_module_with_too_wide_bounds_raises_misuse_if_by_parts_is_false(build: str, message: str) -> None:
    with pytest.raises(Misuse, match=message):
        module_property(HERE + build, HERE + "whole", ((2, 3),), by_parts=False).cases(Space((1,), ("float32",)))


@pytest.mark.parametrize("build", ["draws_from_python", "draws_from_numpy"])
def test_forward_that_draws_from_python_or_numpy_raises_misuse(build: str) -> None:
    pytest.importorskip("numpy")
    with pytest.raises(Misuse, match="output differs between two runs on the same inputs, because the forward draws"):
        module_property(HERE + build, HERE + "whole", ((2, 3),)).cases(Space((1,), limits.DTYPES))


def test_forward_whose_draws_do_not_change_its_outputs_is_judged() -> None:
    prop = module_property(HERE + "draws_without_effect", HERE + "whole", ((2, 3),))

    assert {case.dtype for case in drawn(prop.cases(Space((1,), limits.DTYPES)), 20)} == set(limits.DTYPES)


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("dtypes", "judged", "left_out"),
    [
        (("bfloat16",), set(), ("bfloat16",)),
        (("float64", "bfloat16"), {"float64"}, ("bfloat16",)),
        (("float64",), {"float64"}, ()),
    ],
)
def test_dtypes_in_which_a_module_cannot_be_judged_are_left_out(
    pool: Pool, tmp_path: Path, dtypes: tuple[str, ...], judged: set[str], left_out: tuple[str, ...]
) -> None:
    prop = module_property(HERE + "norm", HERE + "whole", ((2, 3),), by_parts=False)
    found = search(prop, Chunk(1, dtypes, 0, 3), pool, KnownFailures(), tmp_path)

    assert (found.misuse, tuple(found.left_out)) == ("", left_out)
    assert {record.dtype for record in found.records} == judged


def test_dtype_that_is_left_out_beside_another_has_its_own_reason() -> None:
    prop = module_property(
        "equivtest.programs.examples.gated:scaled_block", HERE + "whole", ((4, 2, 2),), batch="whole"
    )
    left_out = prop.left_out(Space((1,), ("float32", "bfloat16")))

    assert left_out.keys() == {"bfloat16"}
    assert "1 rank, results may be rounded: sum may reach 896 units, but bfloat16 is" in left_out["bfloat16"]


def test_reason_against_a_sum_over_the_parts_of_a_batch_names_no_line_of_equivtest() -> None:
    prop = module_property(
        "equivtest.programs.examples.gated:scaled_block", HERE + "whole", ((4, 2, 2),), batch="mean of parts"
    )
    reason = prop.left_out(Space((2,), ("float32", "float16")))["float16"]

    assert "sum may reach 3584 units, but float16 is exact only up to 2048: take smaller sizes" in reason


@pytest.mark.ranks
def test_module_that_no_dtype_can_judge_raises_misuse(pool: Pool, tmp_path: Path) -> None:
    prop = module_property(HERE + "deep", HERE + "whole", ((2, 3),), by_parts=False)
    found = search(prop, Chunk(1, ("bfloat16",), 0, 3), pool, KnownFailures(), tmp_path)

    assert found.misuse and not found.left_out


def test_module_that_rounds_is_refused_in_bfloat16_if_by_parts_is_false() -> None:
    with pytest.raises(Misuse, match="native_layer_norm may round"):
        module_property(HERE + "norm", HERE + "whole", ((2, 3),), by_parts=False).cases(Space((1,), ("bfloat16",)))


@pytest.mark.ranks
@pytest.mark.parametrize(("world_size", "dtype"), [(2, "float32"), (3, "float64")])
@pytest.mark.parametrize("parallelize", ["ddp", "fsdp2", "tensor_parallel"])
def test_right_module_that_rounds_passes_within_its_bounds(
    pool: Pool, parallelize: str, world_size: int, dtype: str
) -> None:
    case = case_of("curved", parallelize, world_size=world_size, dtype=dtype, values=(("real", 0), ("real", 1)))

    assert {verdict.kind for verdict in check("module", case, pool)} == {"holds"}


def test_builder_with_random_numbers_builds_equal_modules_every_time() -> None:
    first = call_builder(HERE + "noisy").get_buffer("noise")
    torch.rand(1)  # as a process may that has done something else
    state = torch.get_rng_state()
    second = call_builder(HERE + "noisy").get_buffer("noise")

    assert torch.equal(first, second) and torch.equal(torch.get_rng_state(), state)


def test_module_may_create_its_mask_in_the_forward() -> None:
    case = case_of("masked", dtype="float64", values=(("real", 0),))

    assert expect(case, 0).tensors["output"].value.shape == (2, 3)


@pytest.mark.ranks
def test_parallel_module_with_another_gelu_approximation_is_rejected(pool: Pool) -> None:
    case = case_of("curved", "with_another_gelu", dtype="float64", values=(("real", 0),))

    with pytest.raises(ValueMismatch, match=r"module: output differs from the oracle(.|\n)*running error of"):
        check("module", case, pool)


@pytest.mark.parametrize(
    ("build", "refused"),
    [("filled_beyond_float16", {"float16"}), ("filled_beyond_float32", {"float32", "bfloat16", "float16"})],
)
@pytest.mark.parametrize("batch", ["whole", "mean of parts"])
def test_dtype_that_the_unsharded_module_refuses_is_not_drawn(build: str, refused: set[str], batch: str) -> None:
    prop, space = module_property(HERE + build, f"{HERE}ddp", [(2, 3)], batch=batch), Space((2,), limits.DTYPES)
    left_out = prop.left_out(space)

    assert left_out.keys() == refused
    assert all(re.search(f"not take .* in {dtype}: .* without overflow", why) for dtype, why in left_out.items())
    assert {case.dtype for case in drawn(prop.cases(space), 20)} == {*limits.DTYPES} - refused


def test_run_with_only_a_dtype_that_the_module_refuses_raises_misuse() -> None:
    prop = module_property(f"{HERE}filled_beyond_float32", f"{HERE}ddp", [(2, 3)], batch="whole")

    with pytest.raises(Misuse, match=r"does not take an x of shape \(2, 3\) in float16: RuntimeError"):
        prop.cases(Space((2,), ("float16",)))


@pytest.mark.ranks
def test_batch_probe_uses_a_dtype_that_the_unsharded_module_accepts(pool: Pool) -> None:
    prop = module_property(f"{HERE}filled_beyond_float32", f"{HERE}ddp", [(2, 3)])

    assert {case.batch for case in drawn(resolved(prop, pool).cases(Space((2,), limits.DTYPES)), 2)} == {
        "mean of parts"
    }
