"""Operators of DTensors: the case, its values, the oracle beside torch unsharded, and what is refused."""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import DynamicOutputShapeException
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from equivtest.base import limits
from equivtest.cases.case import from_code
from equivtest.cases.values import draw
from equivtest.errors import Misuse, NotSupported
from equivtest.families.operators import strategy
from equivtest.families.operators.case import OperatorCase
from equivtest.families.operators.case_forms import Signature
from equivtest.families.operators.case_table import HAND_WRITTEN, OPERATORS, plain_operand, run, signatures_of
from equivtest.families.operators.known import (
    convolves_as_held,
    cuts_blocks_of_pixels,
    gathers_in_front_of,
    has_partial_maximum,
    has_sharded_integers,
    holds_no_channels,
    keeps_placements,
    leaves_nothing_to_reduce,
    masks_ids_twice,
    repeats_uneven_rows,
    shards_index_otherwise,
)
from equivtest.families.operators.oracle import expect_operators, judged_how
from equivtest.families.operators.strategy import operator_cases
from equivtest.families.operators.subject import REFUSALS, run_operator, told
from equivtest.layout import Layout, Replicate, Shard
from equivtest.oracle import expect, expect_held
from equivtest.oracle.running import RunningError
from equivtest.property import Space
from equivtest.ranks.pool import Pool
from equivtest.tensors import Placed
from equivtest.verdicts.elements import is_too_wide
from equivtest.verdicts.judging import check, judge, one_thread
from tests.drawing import STRATEGIES, drawn


@pytest.mark.parametrize(("shape", "is_wrong"), [((4, 4, 5, 5), 0), ((4, 5, 5), 1)])
def test_first_dim_of_a_convolutions_input_is_its_batch_only_if_it_has_as_many_dims_as_the_kernel(
    shape: tuple[int, ...], is_wrong: int
) -> None:
    case = OperatorCase(
        world_size=2, operator="nn.functional.conv2d", operands=(shape, (1, 4, 2, 3)), arguments=(("call", "x0, x1"),),
        placements=(("shard(0)",), ("replicate",)), holds=("any", "any"),
    )  # fmt: skip

    assert convolves_as_held(case) == is_wrong


class Lacking(torch.autograd.Function):
    """The identity, without a kernel in the backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> None:
        raise NotImplementedError("\"angle_cuda\" not implemented for 'BFloat16'")


def lacks_kernel(case: OperatorCase, operands: tuple[Any, ...], arguments: object) -> Any:
    raise NotImplementedError("\"angle_cuda\" not implemented for 'BFloat16'")


def lacks_kernel_in_backward(case: OperatorCase, operands: tuple[Any, ...], arguments: object) -> Any:
    return (Lacking.apply(operands[0]),)  # type: ignore[no-untyped-call]


def lacks_kernel_for_dtensors(case: OperatorCase, operands: tuple[Any, ...], arguments: object) -> Any:
    return lacks_kernel(case, operands, arguments) if isinstance(operands[0], DTensor) else operands


@pytest.mark.parametrize(
    ("call", "kind"),
    [
        (lacks_kernel, NotSupported),
        (lacks_kernel_in_backward, NotSupported),
        (lacks_kernel_for_dtensors, NotImplementedError),
    ],
)
def test_call_is_declined_only_if_plain_tensors_have_no_kernel_for_the_dtype_either(
    alone: DeviceMesh, call: Any, kind: type[Exception]
) -> None:
    case = OperatorCase(world_size=1, operator="angle", requires_grad=(0,))

    with pytest.raises(kind, match="not implemented for 'BFloat16'"):
        run_operator(case, alone, draw(case, 0), call)


@pytest.mark.parametrize(
    ("rows", "placement", "is_wrong"),
    [(2, "shard(1)", 1), (2, "partial(max)", 1), (2, "shard(0)", 0), (2, "replicate", 0), (1, "shard(1)", 0)],
)
def test_gather_by_a_shorter_index_is_known_to_fail_along_a_sharded_dim_that_is_not_indexed(
    rows: int, placement: str, is_wrong: int
) -> None:
    """Three columns lie as 2 and 1, so two columns of the index, as 1 and 1, begin elsewhere on the second rank."""
    case = OperatorCase(
        world_size=2, operator="gather", operands=((2, 3), (2, rows)), arguments=(("dim", 0),),
        placements=((placement,), ("replicate",)),
    )  # fmt: skip

    assert shards_index_otherwise(case) == is_wrong


def test_known_failure_of_a_partial_maximum_covers_each_tensor_of_a_list() -> None:
    fields: dict[str, Any] = {"operator": "_foreach_norm", "operands": ((2,), (2,)), "arguments": (("ord", "inf"),)}
    whole, largest = ("replicate",), ("partial(max)",)

    for placements in ((whole, largest), (largest, whole)):
        assert has_partial_maximum(OperatorCase(world_size=2, placements=placements, **fields))
    assert not has_partial_maximum(OperatorCase(world_size=2, placements=(whole, ("partial(sum)",)), **fields))


def case_of(**fields: Any) -> OperatorCase:
    """The sum of a matrix of five columns, which two ranks share as 3 and 2."""
    base = {"world_size": 2, "operator": "sum", "operands": ((2, 5),), "placements": (("shard(1)",),)}
    return OperatorCase(**{**base, "arguments": (("dim", -1),), "requires_grad": (0,), **fields})


@cache
def drawn_cases() -> tuple[OperatorCase, ...]:
    return tuple(drawn(STRATEGIES["dtensor_operators"](Space(limits.WORLD_SIZES, limits.DTYPES)), 300))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"operator": "total"}, r"operator must be one of .*, got 'total'"),
        ({"mesh": (2, 2)}, r"mesh must have 2 ranks, got \(2, 2\)"),
        ({"arguments": (("dim", 2),)}, r"sum does not take \(\(2, 5\),\) with \(\('dim', 2\),\)"),
        ({"placements": ()}, r"placements must be 1 tuples of placements, got \(\)"),
        ({"placements": (("flat(10)",),)}, "the placement flat is not for DTensors"),
        ({"placements": (("shard(2)",),)}, r"shard\(2\) names no dim"),
        ({"requires_grad": (1,)}, r"requires_grad and strided must name operands, 0 to 0, got \(1,\)"),
        ({"dtype": "bfloat16", "values": (("real", 0),)}, "real values must be of float32 or float64, got bfloat16"),
        ({"records": True}, "only the collectives of a sum of an operand that is not partial"),
        ({"other_dtypes": ("int8",)}, "other_dtypes must be of"),
        (
            {"mesh": (1, 2), "placements": (("replicate",) * 2,), "cotangents": (("partial(sum)", "partial(max)"),)},
            "cotangents must have at most one kind of partial placement",
        ),
        ({"operator": "any of bools", "placements": (("partial(sum)",),)}, "at most one kind of partial placement"),
    ],
)
def test_error_for_an_invalid_operator_call_names_the_invalid_field(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(Misuse, match=message):
        case_of(**fields)


def test_tensors_of_a_case_are_its_operands_results_and_gradients() -> None:
    words = {"refused": (), "grad.refused": ()}

    assert case_of().shapes() == {
        "operand.0": (2, 5), "cotangent.0": (2,), "output.0": (2,), "grad.operand.0": (2, 5), **words
    }  # fmt: skip


def test_result_that_is_not_differentiable_has_no_cotangent() -> None:
    assert "cotangent.0" not in case_of(operator="argmax").shapes()
    assert case_of(operator="argmax").results[0].dtype == "int64"


def test_result_has_the_promoted_dtype_of_two_operands() -> None:
    case = case_of(
        operator="add",
        operands=((2,), (2,)),
        placements=(("replicate",),) * 2,
        arguments=(),
        other_dtypes=("", "float64"),
    )

    assert (case.results[0].dtype, case.dtype_of(0), case.dtype_of(1)) == ("float64", "float32", "float64")
    assert expect(case, 0).tensors["output.0"].dtype == "float64"


@pytest.mark.parametrize("op", ["sum", "avg", "max", "min"])
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_partial_operands_differ_between_ranks_and_reduce_to_integers(op: str, world_size: int) -> None:
    case = case_of(world_size=world_size, placements=((f"partial({op})",),), operands=((6, 5),))
    shares = draw(case, 0)["operand.0"].double()
    whole = {"sum": shares.sum(0), "avg": shares.mean(0), "max": shares.amax(0), "min": shares.amin(0)}[op]

    assert shares.shape == (world_size, 6, 5)
    assert torch.equal(whole, whole.round()) and bool((whole % world_size == 0).all())
    assert not torch.equal(shares[0], shares[1])
    assert (shares > 0).any() and (shares < 0).any()


def test_sum_must_be_exact_on_integers_and_within_a_bound_on_real_values() -> None:
    dense = expect(case_of(), 0).tensors["output.0"]
    real = expect(case_of(values=(("real", 0),)), 0).tensors["output.0"]

    assert dense.allowed is None and dense.derivation.startswith("equal: no operation")
    assert real.allowed is not None and 0 < float(real.allowed.max()) < 1e-4


def test_operator_without_a_rule_is_inconclusive_with_a_reason() -> None:
    case = case_of(operator="linalg.eig", operands=((2, 2),), arguments=(), placements=(("replicate",),))
    tensors = expect(case, 0).tensors
    found = tensors["grad.operand.0"]

    assert is_too_wide(found) and not is_too_wide(tensors["output.0"])
    assert "linalg_eig" in found.derivation and found.derivation.startswith("nothing is concluded")


def test_operator_result_is_judged_although_the_backward_has_no_bound() -> None:
    diagonal = {"operator": "linalg.diagonal", "operands": ((3, 5),), "arguments": (("call", "x0, offset=2"),)}
    case = case_of(**diagonal, holds=("any",), placements=(("shard(0)",),), values=(("real", 1),))
    expected = expect(case, 0).tensors

    assert not is_too_wide(expected["output.0"])
    assert is_too_wide(expected["grad.operand.0"])


def test_requires_grad_is_not_judged_for_a_result_that_has_no_gradient() -> None:
    slogdet = {"operator": "linalg.slogdet", "operands": ((2, 2),), "arguments": (("call", "x0"),)}
    case = case_of(**slogdet, holds=("squares",), placements=(("shard(0)",),))
    flags = {name: tensor.requires_grad for name, tensor in expect(case, 0).tensors.items()}

    assert (flags["output.0"], flags["output.1"]) == (None, True)


def test_sums_too_long_for_a_dtype_are_inconclusive() -> None:
    case = case_of(dtype="bfloat16", world_size=4, operands=((300,),), placements=(("shard(0)",),))

    assert is_too_wide(expect(case, 0).tensors["output.0"])


def test_unsharded_results_of_torch_are_within_the_oracles_bounds() -> None:
    """In the case's own dtype, on one thread, operands reduced as gloo may reduce them: one after the other."""
    num_judged = 0
    with one_thread():
        for case in drawn_cases():
            given, expected = draw(case, 0), expect(case, 0).tensors
            operands = []
            for number in range(len(case.operands)):
                (op, num), tensor = case.reduction(f"operand.{number}"), given[f"operand.{number}"]
                stack = tensor.reshape((num, *case.operands[number]))
                sums = {"sum": stack.sum, "avg": stack.mean, "max": stack.amax, "min": stack.amin}
                operands.append(sums[op](0) if op else tensor)
            for number, result in enumerate(run(case.operator, tuple(operands), case.arguments)):
                right = expected[f"output.{number}"]
                allowed = torch.zeros_like(right.value) if right.allowed is None else right.allowed
                same = (result.double() == right.value) | (result.isnan() & right.value.isnan())
                assert bool((same | ((result.double() - right.value).abs() <= allowed)).all()), case
                num_judged += not is_too_wide(right)

    assert num_judged > 250


def test_operator_result_is_judged_under_the_layout_of_the_first_rank() -> None:
    case = case_of(operator="abs", arguments=())
    placed = Placed(torch.zeros(2, 3), Layout((Shard(1),)))

    assert expect_held(case, 0, {0: {"output.0": placed}, 1: {}}).tensors["output.0"].layout == Layout((Shard(1),))


MESH: Any = SimpleNamespace(ndim=1)


def refusal(text: str) -> Placed:
    return Placed(torch.tensor(list(text.encode()), dtype=torch.uint8), Layout((Replicate(),)))


def test_operator_that_every_rank_refuses_is_inconclusive() -> None:
    held = {rank: {"refused": refusal("no strategy")} for rank in range(2)}
    [(name, tensor)] = expect_held(case_of(), 0, held).tensors.items()

    assert name == "refused" and is_too_wide(tensor) and "no strategy" in tensor.derivation


def test_operator_result_is_judged_if_only_the_backward_is_refused() -> None:
    held = {rank: {"grad.refused": refusal("no strategy")} for rank in range(2)}
    tensors = expect_held(case_of(), 0, held).tensors

    assert set(tensors) == {"output.0", "grad.refused"} and tensors["output.0"].allowed is None


def test_operator_that_only_one_rank_refuses_fails() -> None:
    held = {0: {"refused": refusal("no strategy")}, 1: {}}

    assert set(expect_held(case_of(), 0, held).tensors) == set(expect_operators(case_of(), 0).tensors)


@pytest.mark.parametrize("mistake", ["list index out of range", "Strategy length 6 != expected 5", "0"])
def test_mistake_within_a_rule_is_no_refusal(mistake: str) -> None:
    error = RuntimeError(f"{mistake}\n\nSharding propagation failed for aten.split.Tensor")

    with pytest.raises(RuntimeError, match="Sharding propagation failed"):
        told(error, MESH)


def test_error_that_a_rule_raises_on_purpose_is_a_refusal() -> None:
    error = RuntimeError("Please redistribute the input first.\n\nSharding propagation failed for aten.view.default")

    assert bytes(told(error, MESH).local.tolist()).decode() == f"RuntimeError: {error}"


def test_rule_that_cannot_know_the_shape_of_the_result_refuses() -> None:
    error = RuntimeError("aten.nonzero.default\n\nSharding propagation failed for aten.nonzero.default")
    error.__cause__ = DynamicOutputShapeException(torch.ops.aten.nonzero.default)

    assert told(error, MESH).local.numel()


def test_a_third_of_operator_cases_have_uneven_or_empty_shards() -> None:
    kinds = [case.shard_kind for case in drawn_cases() if case.world_size > 1]

    assert {"even", "uneven", "empty"} == set(kinds)
    assert 3 * sum(kind != "even" for kind in kinds) > len(kinds)


@pytest.mark.parametrize(
    ("fields", "fact", "is_so"),
    [
        ({"operator": "amax", "operands": ((2, 0),), "placements": (("shard(0)",),), "arguments": (("dim", 0),)}, 0, 0),
        ({"operator": "amax", "operands": ((1, 2),), "placements": (("shard(0)",),), "arguments": (("dim", 0),)}, 0, 1),
        ({"operator": "amax", "operands": ((1, 2),), "placements": (("shard(0)",),), "arguments": (("dim", 1),)}, 0, 0),
        ({"operator": "amax", "operands": ((1, 2),), "placements": (("shard(0)",),), "arguments": ()}, 0, 1),
        ({"operator": "argmax", "operands": ((1, 4),), "arguments": (("dim", -1),)}, 1, 1),
        ({"operator": "argmax", "operands": ((2, 4),), "arguments": (("dim", -1),)}, 1, 0),
        ({"operator": "argmax", "operands": ((2, 4),), "arguments": (("dim", 1),)}, 1, 0),
        ({"operator": "squeeze in place", "operands": ((1, 2),), "arguments": (("dim", 0),)}, 2, 0),
        ({"operator": "squeeze in place", "operands": ((2, 1, 1),), "arguments": (("dim", -1),)}, 2, 1),
    ],
)
def test_known_failure_predicates_of_operators_depend_on_the_shards_of_a_case(
    fields: dict[str, Any], fact: int, is_so: int
) -> None:
    facts = (leaves_nothing_to_reduce, gathers_in_front_of, keeps_placements)

    assert facts[fact](case_of(**fields)) == bool(is_so)


@pytest.mark.parametrize(
    ("rows", "placements", "is_so"),
    [
        (4, ("shard(0)", "shard(0)"), 1),
        (3, ("shard(0)", "shard(0)"), 0),
        (4, ("shard(0)", "replicate"), 0),
        (4, ("shard(0)", "shard(1)"), 0),
    ],
)
def test_embedding_masks_ids_twice_if_both_axes_divide_its_rows(
    rows: int, placements: tuple[str, ...], is_so: int
) -> None:
    embedding = {"operator": "nn.functional.embedding", "arguments": (("call", "x1, x0"),), "holds": ("any", "below 1")}
    places = (placements, ("replicate", "replicate"))
    case = case_of(**embedding, world_size=4, mesh=(2, 2), operands=((rows, 2), (1,)), placements=places)

    assert masks_ids_twice(case) == bool(is_so)


@pytest.mark.parametrize(
    ("operator", "shape", "dim", "is_cut", "is_uneven"),
    [
        ("unshuffle", (1, 6, 2), 1, 1, 0),
        ("unshuffle", (1, 2, 2), 1, 1, 0),
        ("unshuffle", (2, 2, 2), 1, 0, 0),
        ("unshuffle", (1, 4, 2), 1, 0, 0),
        ("unshuffle", (1, 2, 2), 2, 0, 0),
        ("unshuffle", (1, 2, 6), 2, 1, 0),
        ("shuffle", (12, 1, 1), 0, 1, 0),
        ("shuffle", (4, 2, 2), 0, 0, 0),
        ("shuffle", (4, 3, 1), 1, 0, 1),
        ("shuffle", (4, 2, 2), 1, 0, 0),
    ],
)
def test_blocks_of_pixels_are_cut_by_shards_that_are_no_multiple_of_them(
    operator: str, shape: tuple[int, ...], dim: int, is_cut: int, is_uneven: int
) -> None:
    call = {"operator": f"nn.functional.pixel_{operator}", "arguments": (("call", "x0, 2"),), "holds": ("any",)}
    case = case_of(**call, operands=(shape,), placements=((f"shard({dim})",),), world_size=2)

    assert (cuts_blocks_of_pixels(case), repeats_uneven_rows(case)) == (bool(is_cut), bool(is_uneven))


@pytest.mark.parametrize(
    ("shape", "dim", "is_so"), [((1, 4), 0, 1), ((2, 4), 0, 0), ((3, 1, 4), 1, 1), ((1, 3, 4), 0, 0), ((3, 1), 1, 0)]
)
def test_pool_of_fewer_channels_than_ranks_leaves_a_rank_without_channels(
    shape: tuple[int, ...], dim: int, is_so: int
) -> None:
    pool = {"operator": "nn.functional.avg_pool1d", "arguments": (("kernel_size", 1),)}

    assert holds_no_channels(case_of(**pool, operands=(shape,), placements=((f"shard({dim})",),))) == bool(is_so)


def test_case_of_norm_with_ord_inf_survives_a_round_trip_through_code() -> None:
    case = case_of(operator="norm", arguments=(("ord", "inf"),))

    assert from_code(repr(case)) == case
    assert float(expect(case, 0).tensors["output.0"].value) == float(draw(case, 0)["operand.0"].abs().max())


def test_operand_of_reshape_is_never_sharded_on_one_dim_along_both_axes() -> None:
    """Of findings 55 and 56: neither is an index of one row drawn on two axes."""
    names = ("reshape", "gather", "abs")
    cases = drawn(operator_cases(Space((4,), ("float32",)), operators=names), 400)
    nested = {case.operator for case in cases if ("shard(0)", "shard(0)") in case.placements + case.cotangents}

    assert nested == {"gather", "abs"}
    picking = [case for case in cases if case.operator == "gather"]
    meshes = {is_one: {case.mesh for case in picking if (index_rows(case) == 1) == is_one} for is_one in (True, False)}
    assert meshes == {True: {()}, False: {(), (2, 2)}}


def takes_strided(name: str, signature: Signature) -> bool:
    """True if unsharded torch runs the call on float64 operands whose last two dims are swapped in memory."""
    operator = OPERATORS[name]
    plain = [
        plain_operand(operator.kind_of(number), operator.domain_of(number), shape, "float64")
        for number, shape in enumerate(signature.shapes)
    ]
    try:
        run(name, tuple(each.mT.contiguous().mT if each.dim() >= 2 else each for each in plain), signature.arguments)
    except RuntimeError:
        return False
    return True


def test_operators_that_refuse_strided_operands_are_drawn_on_contiguous_ones() -> None:
    shapes = ((2, 3), (3, 2, 2))
    refusing = tuple(
        name
        for name in HAND_WRITTEN
        if not all(takes_strided(name, each) for shape in shapes for each in signatures_of(name, shape))
    )
    cases = drawn(operator_cases(Space((2,), ("float32",)), operators=refusing), 100)

    assert {"view", "view_as_complex"} <= {case.operator for case in cases}
    assert not any(case.strided for case in cases)


def index_rows(case: OperatorCase) -> int:
    """Of the index, along the dim that it counts along."""
    assert isinstance(case.dim, int)
    return case.operands[1][case.dim]


@pytest.mark.parametrize("name", HAND_WRITTEN)
def test_every_operator_has_a_signature(name: str) -> None:
    assert any(signatures_of(name, shape) for shape in ((2,), (2, 2), (2, 2, 2), ()))


@pytest.mark.parametrize(("operator", "may_be_none"), [("exp", False), ("zeros_like", True)])
def test_gradient_may_be_none_only_if_it_is_zero(operator: str, may_be_none: bool) -> None:  # noqa: FBT001
    """DTensor loses some: findings/62."""
    case = OperatorCase(world_size=1, operator=operator, requires_grad=(0,), values=(("real", 0),))
    tensors = expect(case, 0).tensors

    assert all(right.may_be_none == may_be_none for name, right in tensors.items() if name.startswith("grad."))
    assert may_be_none or "grad.operand.0" in tensors


@pytest.mark.ranks
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"placements": (("partial(avg)",),)},
        {"world_size": 4, "mesh": (2, 2), "placements": (("partial(sum)", "shard(0)"),)},
        {"operator": "topk", "arguments": (("dim", -1), ("k", 2))},
        {"operator": "transpose", "arguments": (("dim0", 0), ("dim1", -1)), "strided": (0,)},
        {"operator": "norm", "arguments": (("ord", 2),), "values": (("real", 1),)},
    ],
)
def test_torch_passes_on_operators_with_drawn_placements(fields: dict[str, Any], pool: Pool) -> None:
    assert all(verdict.kind == "holds" for verdict in check("dtensor_operators", case_of(**fields), pool, _claims()))


@pytest.mark.ranks
def test_operator_without_a_strategy_is_not_supported_with_torchs_message(pool: Pool) -> None:
    case = case_of(operator="unfold", arguments=(("dimension", 0), ("size", 1), ("step", 1)))
    verdicts = judge("dtensor_operators", case, pool, _claims())

    assert {verdict.kind for verdict in verdicts if verdict.claim == "equals_unsharded"} == {"inconclusive"}
    assert not any(verdict.failed for verdict in verdicts)
    assert "does not have a sharding strategy registered" in [words for _, words in REFUSALS]


def _claims() -> tuple[Any, ...]:
    from properties.test_operators import dtensor_operators

    return dtensor_operators.claims


def test_exception_within_running_error_analysis_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """A release of torch without one operator of its rules made it leave every operator open."""

    def lacks_an_operator(*_args: object) -> None:
        raise AttributeError("no such operator")

    monkeypatch.setattr(RunningError, "__init__", lacks_an_operator)

    with pytest.raises(AttributeError, match="no such operator"):
        judged_how(OperatorCase(world_size=1, operator="exp", values=(("real", 4711),)), 0)


def test_operator_that_the_installed_torch_lacks_is_not_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        strategy, "signatures_of", lambda name, shape: () if name == "neg" else signatures_of(name, shape)
    )
    space = Space((2,), ("float32",))

    assert {case.operator for case in drawn(operator_cases(space, operators=("neg", "abs")), 10)} == {"abs"}
    with pytest.raises(Misuse, match="refuses the calls of neg in the table of operators"):
        drawn(operator_cases(space, operators=("neg",)), 1)


@pytest.mark.parametrize(
    ("weight", "ids", "has"),
    [("shard(1)", "replicate", False), ("shard(0)", "replicate", False), ("replicate", "shard(0)", True)],
)
def test_only_sharded_ids_of_an_embedding_count_as_sharded_integers(weight: str, ids: str, *, has: bool) -> None:
    case = OperatorCase(
        world_size=2, operator="nn.functional.embedding", operands=((4, 3), (5,)), holds=("any", "below 4"),
        arguments=(("call", "x1, x0, scale_grad_by_freq=True"),), placements=((weight,), (ids,)),
    )  # fmt: skip

    assert has_sharded_integers(case) is has
