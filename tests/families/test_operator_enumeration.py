"""The enumerated calls of operators: which there are, and what a call looks like."""

from __future__ import annotations

import math
from collections import defaultdict
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from torch.distributed.device_mesh import DeviceMesh

from equivtest.base.profiles import PROFILES, plan_enumeration
from equivtest.cases.case import from_code
from equivtest.cases.subject import Answers, Given
from equivtest.cases.values import draw
from equivtest.errors import Misuse
from equivtest.families.operators import case_samples, strategy_calls
from equivtest.families.operators.case import OperatorCase
from equivtest.families.operators.case_samples import LEFT_OUT, ROWS, UNDECIDED, function_of, run_form, way_of
from equivtest.families.operators.case_table import HAND_WRITTEN, LISTS, OPERATORS
from equivtest.families.operators.oracle import judged_how
from equivtest.families.operators.strategy_calls import (
    CONVOLUTIONS,
    ENUMERATED,
    OF_EACH_KIND,
    OWN_SHAPE,
    PARTS,
    REFUSED,
    WRITING,
    calls_of,
    calls_of_operator,
    covering,
)
from equivtest.families.operators.strategy_changes import with_one_change
from equivtest.families.operators.strategy_forms import forms_of
from equivtest.families.operators.subject import operators
from equivtest.property import Space
from equivtest.pytest_plugin.suite import shipped
from equivtest.ranks.pool import Pool
from equivtest.search.chunks import Chunk, chunk_cases
from equivtest.verdicts.claims import equals_unsharded, gradients_equal_unsharded
from equivtest.verdicts.judging import judge
from studies.operator_defects import killed
from studies.operator_forms import undecided
from tests.gate import KNOWN, known_in, rejects
from tests.planted.subjects import WRONG

LOSSES = ("nn.functional.mse_loss", "nn.functional.smooth_l1_loss", "nn.functional.huber_loss")


def calls(name: str, depth: int = 1) -> tuple[OperatorCase, ...]:
    return calls_of_operator(name, 2, "float32", depth)


@cache
def gate_calls(world_size: int) -> list[OperatorCase]:
    space = Space((world_size,), ("float32", "float64"))
    return [call for part in range(PARTS[world_size]) for call in calls_of(space, 1, part)]


def test_operator_that_the_installed_torch_lacks_has_no_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    lacking = ("nn.functional.mse_loss", "addcmul_")
    monkeypatch.setattr(case_samples, "function_of", lambda name: None if name in lacking else function_of(name))
    rows, _, _ = case_samples._read()

    assert {row.name for row in ROWS} - {row.name for row in rows} == {"nn.functional.mse_loss", "addcmul in place"}


@pytest.mark.parametrize("name", [*LOSSES, "add", "lerp", "nn.functional.cosine_similarity"])
def test_enumerated_calls_of_an_operator_have_each_form_and_each_placement(name: str) -> None:
    found = calls(name, 2)
    placements = {case.placements[0][0] for case in found}

    assert {case.arguments for case in found} == {form.arguments for form in forms_of(name)}
    assert {"shard(0)", "partial(sum)", "partial(max)"} <= placements


def test_enumerated_calls_of_depth_two_have_each_pair_of_placements() -> None:
    pairs = {(case.placements[0], case.placements[1]) for case in calls("nn.functional.mse_loss", 2)}
    texts = ("replicate", "shard(0)", "shard(1)", "partial(sum)", "partial(avg)", "partial(max)", "partial(min)")

    assert {((a,), (b,)) for a in texts for b in texts} - {(("replicate",), ("replicate",))} <= pairs


def test_enumerated_calls_have_even_and_uneven_shards() -> None:
    kinds = defaultdict(set)
    for name in LOSSES:
        for case in calls(name, 2):
            kinds[name].add(case.shard_kind)

    assert all({"even", "uneven"} <= kinds[name] for name in LOSSES)


def test_all_parts_of_an_enumeration_together_call_every_operator() -> None:
    assert {case.operator for case in gate_calls(2)} == set(ENUMERATED)


def test_conformance_run_calls_operators_that_a_gate_run_skips_as_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strategy_calls, "covering", lambda name, rows, strength: rows[:1])
    monkeypatch.setattr(strategy_calls, "calls_of_operator", calls_of_operator.__wrapped__)
    names = {case.operator for part in range(PARTS[2]) for case in calls_of(Space((2,), ("float32",)), 2, part)}

    assert names - set(ENUMERATED) == REFUSED


@pytest.mark.ranks
@pytest.mark.parametrize("name", sorted(REFUSED))
def test_operator_that_a_gate_run_skips_as_refused_is_refused_by_every_rank(name: str, pool: Pool) -> None:
    [verdict] = judge("dtensor_operators", calls(name)[0], pool, (equals_unsharded,))

    assert set(verdict.judgement.margins) == {"refused"}, "DTensor computes it: remove it from REFUSED"


@pytest.mark.parametrize("name", sorted(set(UNDECIDED) - {"_segment_reduce"}))  # it writes past its end if called
def test_operator_that_a_gate_run_skips_as_undecided_has_no_bound(name: str) -> None:
    assert undecided(name), "the oracle can judge it: run python -m studies.operator_forms --undecided"


def has_whole_call(name: str) -> bool:
    return any(set(case.placements) == {("replicate",)} for case in calls(name))


def test_gate_run_calls_each_unary_operator_on_a_replicated_operand() -> None:
    names = [name for name in HAND_WRITTEN if any(len(form.shapes) == 1 for form in forms_of(name))]

    assert len(names) > 200
    assert [name for name in names if not has_whole_call(name)] == []


def test_enumeration_appends_a_call_on_a_replicated_operand() -> None:
    *others, last = calls("flip")

    assert last.placements == (("replicate",),)
    assert {case.arguments for case in others} == {form.arguments for form in forms_of("flip")}


@pytest.mark.parametrize("name", sorted(CONVOLUTIONS))
def test_gate_run_calls_each_form_of_a_convolution_on_a_sharded_batch(name: str) -> None:
    *by_batch, whole = calls(name)

    assert set(whole.placements) == {("replicate",)}
    assert {case.placements[0] for case in by_batch} == {("shard(0)",)}
    assert {case.arguments for case in by_batch} == {form.arguments for form in forms_of(name)}


def test_gate_run_enumerates_six_calls_of_each_loss() -> None:
    assert {len(calls(name)) for name in LOSSES} == {6}
    assert not set(UNDECIDED) & set(ENUMERATED)
    assert undecided("special.airy_ai").endswith("no bound is known for special_airy_ai")
    assert not undecided("nn.functional.mse_loss")


def test_run_in_bfloat16_alone_has_no_enumerated_calls() -> None:
    assert calls_of(Space((2,), ("bfloat16",)), 1, 0) == []


def test_chunk_judges_only_the_calls_of_its_part_of_the_enumeration() -> None:
    prop = shipped()["dtensor_operators"]
    chunk = Chunk(2, ("float32",), 3, 300, depth=1)

    assert chunk_cases(prop, chunk) == calls_of(chunk.space, 1, 3)


def test_enumerated_calls_have_one_operand_or_all_operands_partial() -> None:
    found = {tuple(text for (text,) in case.placements) for case in calls("mul")}
    share, whole = "partial(sum)", "replicate"

    assert {(share, share), (share, whole), (whole, share)} <= found


def test_enumeration_keeps_a_call_only_if_it_adds_a_value_or_a_pair() -> None:
    form = forms_of("add")[0]
    texts = ("shard(0)", "partial(sum)")
    rows = [(form, (a, b), "replicate", "real") for a in texts for b in texts]

    assert covering("add", rows, 1) == [rows[3], rows[0]]
    assert set(covering("add", rows, 2)) == set(rows)


def test_enumeration_shards_two_operands_along_different_dims() -> None:
    found = {tuple(text for (text,) in case.placements) for case in calls("addcmul")}
    crossed = {tuple(dict.fromkeys(text for text in texts if text.startswith("shard"))) for texts in found}

    assert {("shard(0)", "shard(1)"), ("shard(1)", "shard(0)")} <= crossed


@pytest.mark.parametrize("name", ["prod", "linalg.vector_norm", "cumsum", "cat"])
def test_enumeration_has_a_shard_that_leaves_a_rank_without_elements(name: str) -> None:
    found = {(text, call.operands[0]) for call in calls(name) for text in call.placements[0]}

    assert ("shard(1)", (3, 1, 4)) in found


def test_enumerated_call_survives_a_round_trip_through_code() -> None:
    for case in calls("nn.functional.cross_entropy"):
        assert from_code(repr(case)) == case


def test_argument_text_of_a_call_can_name_operands_constants_and_dtypes() -> None:
    import torch

    x = torch.tensor([1.0, -2.0])

    assert run_form("clamp", "x0, min=-inf, max=0.5", [x])[0].tolist() == [0.5, -2.0]
    assert run_form("sum", "x0, dtype=torch.float64", [x])[0].dtype == torch.float64
    assert run_form("add in place", "x0, x0, alpha=2", [x])[0].tolist() == [3.0, -6.0]
    assert run_form("add out", "x0, x0", [x])[0].tolist() == [2.0, -4.0]
    assert x.tolist() == [1.0, -2.0]


def test_operator_case_with_an_unknown_kind_of_operand_values_raises_misuse() -> None:
    with pytest.raises(Misuse, match=r"holds must name for each operand one of any, .* got \('small',\)"):
        OperatorCase(world_size=1, operator="neg", holds=("small",))


def test_operand_declared_as_below_3_has_the_integers_0_to_2() -> None:
    case = OperatorCase(world_size=1, operator="eq", operands=((50,),) * 2, placements=(("replicate",),) * 2,
                        arguments=(), holds=("any", "below 3"))  # fmt: skip

    assert set(draw(case, 0)["operand.1"].tolist()) == {0, 1, 2}


def test_oracle_computes_one_result_for_all_layouts_of_a_call() -> None:
    whole, divided = (
        OperatorCase(world_size=2, operands=((4,),), placements=((text,),), requires_grad=(0,))
        for text in ("replicate", "shard(0)")
    )

    assert judged_how(whole, 0) is judged_how(divided, 0)


def test_every_operator_of_torchs_list_is_judged_or_left_out_for_a_reason() -> None:
    pytest.importorskip("expecttest", reason="torch's list imports it")
    from torch.testing._internal.common_methods_invocations import op_db

    known = {row.name for row in ROWS} | set(OPERATORS) | set(LEFT_OUT)

    assert {info.name for info in op_db} <= known
    assert not set(LEFT_OUT) & set(OPERATORS)


def test_every_process_enumerates_the_same_calls() -> None:
    first = calls_of(Space((2,), ("float32",)), 1, 5)
    strategy_calls.calls_of_operator.cache_clear()
    forms_of.cache_clear()

    assert calls_of(Space((2,), ("float32",)), 1, 5) == first


@pytest.mark.parametrize(("profile", "depth"), [("smoke", 0), ("gate", 1), ("conformance", 2), ("soak", 0)])
def test_profile_determines_the_depth_of_the_enumeration(profile: str, depth: int) -> None:
    parts = plan_enumeration(PROFILES[profile], {2: 2, 3: 1})

    assert [part.label for part in parts] == ["w2-calls-0", "w2-calls-1", "w3-calls-0"][: 3 * bool(depth)]
    assert {part.depth for part in parts} == ({depth} if depth else set())


def test_some_enumerated_addmm_shards_both_dims_of_the_contraction() -> None:
    found = {tuple(text for (text,) in case.placements) for case in calls("addmm")}

    assert ("replicate", "shard(1)", "shard(0)") in found


def test_some_enumerated_call_of_tensor_repeat_shards_a_repeated_dim() -> None:
    found = {(dict(case.arguments)["repeats"], case.placements[0]) for case in calls("repeat")}

    assert any(isinstance(repeats, tuple) and repeats[-2:] == (2, 1) and at == ("shard(0)",) for repeats, at in found)


def test_each_of_many_operands_is_partial_in_some_call() -> None:
    found = calls("nn.functional.binary_cross_entropy_with_logits", 2)
    partial = {n for case in found for n, texts in enumerate(case.placements) if texts[0].startswith("partial")}

    assert partial == {0, 1, 2, 3}


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_partial_operands_of_floor_are_quarters_that_sum_to_halves(world_size: int) -> None:
    case = OperatorCase(world_size=world_size, operator="floor", operands=((40,),), placements=(("partial(sum)",),))
    shares = draw(case, 0)["operand.0"].reshape(world_size, 40)

    assert set(shares.sum(0).remainder(1).tolist()) == {0.5}
    assert world_size == 1 or {0.25, 0.75} <= set(shares.remainder(1).flatten().tolist())


RULES = {
    "product_of_shares": "mul",
    "bias_on_every_rank": "addmm",
    "batched_bias_on_every_rank": "baddbmm",
    "floor_of_shares": "floor",
    "copies_of_own_rows": "repeat",
    "gradient_by_shares": "tanh_backward",
}
"""Wrong rules that random cases of a gate do not reject, and their operators."""


@pytest.mark.ranks
@pytest.mark.parametrize("rule", RULES)
def test_enumerated_calls_of_a_gate_run_reject_a_wrong_sharding_rule(rule: str, pool: Pool) -> None:
    assert killed(rule, calls(RULES[rule]), pool).startswith("equals_unsharded")


def on_two_dtypes(name: str) -> list[OperatorCase]:
    return [call for call in gate_calls(2) if call.operator == name and call.other_dtypes]


@pytest.mark.parametrize("name", sorted(strategy_calls.PROMOTING & set(strategy_calls.ENUMERATED)))
def test_gate_run_calls_an_operator_that_promotes_on_two_dtypes(name: str) -> None:
    assert ("float32", "float64") in [call.dtypes for call in on_two_dtypes(name)]


@pytest.mark.parametrize("name", ["add", "mul", "where", "copy in place"])
def test_gate_run_calls_an_operator_on_an_operand_without_dims_of_another_dtype(name: str) -> None:
    found = [pair for call in on_two_dtypes(name) for pair in zip(call.operands, call.other_dtypes, strict=True)]

    assert ((), "float64") in found


def places(name: str) -> set[tuple[str, bool, object]]:
    """Returns (place of the sharded dim, whether several dims are named, keepdim) of an operator's calls."""
    found = set()
    for case in calls(name):
        arguments, [[text]] = dict(case.arguments), case.placements
        dim: Any = arguments.get("dim")
        dims = () if dim is None else dim if isinstance(dim, tuple) else (dim,)
        named = [each % len(case.operands[0]) for each in dims]
        if named and text.startswith("shard"):
            sharded = int(text.removeprefix("shard(").removesuffix(")"))
            where = "named" if sharded in named else "before" if sharded < min(named) else "behind"
            found.add((where, len(named) > 1, arguments.get("keepdim", False)))
    return found


@pytest.mark.parametrize("name", ["sum", "amax", "any", "argmax"])
def test_gate_run_reduces_a_dim_before_at_and_behind_the_sharded_dim(name: str) -> None:
    each = {(where, False, keeps) for where in ("before", "named", "behind") for keeps in (False, True)}

    assert each <= places(name)


@pytest.mark.parametrize("name", ["amax", "aminmax", "argmax", "var"])
def test_gate_run_reduces_all_dims_of_a_shard_and_keeps_them(name: str) -> None:
    kept = [case for case in calls(name) if dict(case.arguments) == {"dim": None, "keepdim": True}]

    assert any(case.placements[0] in [("shard(0)",), ("shard(1)",)] for case in kept)


@pytest.mark.parametrize("name", ["t", "softmax", "cumsum", "add"])
def test_gate_run_calls_an_operator_on_a_sharded_vector(name: str) -> None:
    found = [case for case in gate_calls(2) if case.operator == name and case.operands[0] == (5,)]

    assert any(case.placements[0] == ("shard(0)",) for case in found)


@pytest.mark.parametrize("name", ["sum", "amax", "any", "linalg.vector_norm"])
def test_gate_run_keeps_several_reduced_dims_before_a_sharded_dim(name: str) -> None:
    assert ("behind", True, True) in places(name)


@pytest.mark.parametrize(("name", "number"), [("mul", "other"), ("div", "other"), ("add", "alpha"), ("add", "other")])
@pytest.mark.parametrize("op", ["sum", "avg", "max", "min"])
def test_gate_run_puts_numbers_of_both_signs_beside_each_partial_operand(name: str, number: str, op: str) -> None:
    values = [dict(case.arguments).get(number) for case in calls(name) if case.placements[0] == (f"partial({op})",)]
    signs = {math.copysign(1, value) for value in values if isinstance(value, int | float)}

    assert signs == {-1.0, 1.0}


@pytest.mark.parametrize("op", ["sum", "max"])
def test_gate_run_calls_an_operator_of_two_operands_on_one_partial_operand(op: str) -> None:
    share, whole = (f"partial({op})",), ("replicate",)

    assert {(share, whole), (whole, share)} <= {case.placements for case in calls("mul")}


@pytest.mark.parametrize("name", LISTS)
def test_every_result_of_an_operator_on_lists_is_judged(name: str) -> None:
    allowed = [found.allowed for case in calls(name) for found in judged_how(case, 0).values()]

    assert len(allowed) >= 20
    assert not any(each is not None and each.isinf().any() for each in allowed)


HANDLED_ALONE = {"nn.functional.embedding", "argmax", "sum", "softmax", "index_select", "mm", "add", "view"}


def test_gate_run_calls_an_operator_on_the_second_axis_of_a_mesh() -> None:
    found = {call.operator: call for call in gate_calls(2) if len(call.mesh_shape) == 2}

    assert set(found) >= HANDLED_ALONE
    assert "tanh" not in found, "elementwise operators share one rule"
    assert {call.mesh_shape for call in found.values()} == {(1, 2)}
    assert {texts[0] for call in found.values() for texts in call.placements} == {"replicate"}
    assert all(any(texts[1] != "replicate" for texts in call.placements) for call in found.values())


@pytest.mark.parametrize("name", ["transpose", "slice", "amax", "roll", "cumsum"])
def test_gate_run_repeats_a_call_with_other_arguments(name: str) -> None:
    found = defaultdict[object, set[object]](set)
    for call in gate_calls(2):
        if call.operator == name and call.placements[0][0].startswith("shard") and len(call.mesh_shape) == 1:
            found[call.operands, call.placements, call.members].add(call.arguments)

    assert max(map(len, found.values())) >= 3


def changed(name: str, **fields: Any) -> list[str]:
    case = OperatorCase(**{"world_size": 2, "operator": name, "placements": (("shard(0)",),), **fields})
    return [", ".join(f"{key}={value}" for key, value in other.arguments) for other in with_one_change(case)]


def test_each_argument_of_a_call_is_changed_alone() -> None:
    given: Any = (("dim", 1), ("keepdim", True))

    assert changed("amax", operands=((3, 2, 4),), arguments=given) == ["dim=2, keepdim=True", "dim=1, keepdim=False"]
    assert changed("amax", operands=((3, 2, 4),), arguments=given[:1]) == ["dim=2", "dim=1, keepdim=True"]
    assert changed("permute", operands=((3, 2),), arguments=(("dims", (1, 0)),)) == ["dims=(0, 1)"]
    assert changed("topk", operands=((3, 1, 4),), arguments=(("dim", 1), ("k", 1))) == [  # not k=0
        "dim=2, k=1",
        "dim=1, k=1, largest=False",
    ]


def test_each_number_of_a_call_from_torchs_list_is_changed_alone() -> None:
    given: Any = (("call", "x0, kernel_size=2, stride=1, ceil_mode=False"),)
    texts = {"kernel_size=3, stride=1, ceil_mode=False", "kernel_size=2, stride=2, ceil_mode=False"}

    found = changed("nn.functional.max_pool1d", operands=((2, 5),), arguments=given, holds=("any",))

    assert set(found) == {f"call=x0, {each}" for each in (*texts, "kernel_size=2, stride=1, ceil_mode=True")}


def test_text_among_the_arguments_of_a_call_is_replaced_by_another_text_of_its_kind() -> None:
    assert changed("nn.functional.gelu", arguments=(("approximate", "tanh"),)) == ["approximate=none"]
    assert changed(
        "nn.functional.conv1d", operands=((2, 1, 5), (1, 1, 3)), arguments=(("call", "x0, x1, padding='same'"),),
        holds=("any", "any"), placements=(("shard(0)",), ("replicate",)),
    ) == ["call=x0, x1, padding='valid'"]  # fmt: skip


@pytest.mark.parametrize("name", ["mul", "add", "maximum", "eq"])
def test_gate_run_calls_an_operator_on_a_column_and_a_row(name: str) -> None:
    pairs = [case.operands for case in calls(name) if len(case.operands) == 2]

    assert any(column[-1:] == (1,) == row[:1] and column[0] > 1 < row[-1] for column, row in pairs)


def test_gate_run_calls_operators_in_place_and_with_a_given_result() -> None:
    names = {call.operator for call in gate_calls(2)}

    assert {"mul out", "acos in place", "index_add in place", "cumsum out"} <= names
    assert not {name for call in gate_calls(4) if way_of(name := call.operator)} & WRITING


def test_call_without_a_backward_is_changed_without_gradients() -> None:
    found = {
        call.arguments: call.requires_grad for call in gate_calls(2) if call.operator == "nn.functional.group_norm"
    }

    assert found[(("call", "x0, 3, weight=x1, bias=x2, eps=-0.5"),)] == ()


@pytest.mark.ranks
def test_gate_run_rejects_a_cache_of_rules_that_ignores_keepdim(pool: Pool) -> None:
    subject = "tests.planted.subjects:kept_dims_of_a_variance_remembered__dtensor_operators"
    found = [call for call in gate_calls(2) if call.operator == "var"]

    assert any(verdict.failed for call in found for verdict in judge(subject, call, pool, (equals_unsharded,)))


def with_partial_cotangents(name: str) -> OperatorCase:
    [found] = [call for call in gate_calls(2) if call.operator == name and ("partial(sum)",) in call.cotangents]
    return found


def own_terms(case: OperatorCase, mesh: DeviceMesh, given: Given) -> Answers:
    """Takes each rank's term of a partial cotangent for the whole cotangent."""
    own = {name: tensor[0] if name.startswith("cotangent") else tensor for name, tensor in given.items()}
    return operators(replace(case, cotangents=()), mesh, own)


@pytest.mark.parametrize("mode", ["dense", "real"])
def test_gradient_by_partial_cotangents_is_that_by_their_sum(mode: str) -> None:
    import torch

    case = OperatorCase(world_size=2, placements=(("shard(0)",),), operands=((4,),), requires_grad=(0,),
                        cotangents=(("partial(sum)",),), values=((mode, 1),))  # fmt: skip
    terms, found = draw(case, 0)["cotangent.0"], judged_how(case, 0)["grad.operand.0"]

    assert terms.shape == (2, 4) and not torch.equal(terms[0], terms.sum(0))
    assert torch.equal(found.value, terms.double().sum(0).to(terms.dtype).double())
    assert (found.allowed is None) == (mode == "dense")


@pytest.mark.ranks
@pytest.mark.parametrize("name", ["sigmoid", "mm", "softmax", "cumsum"])
def test_gate_run_rejects_a_backward_of_each_ranks_own_cotangent(name: str, pool: Pool) -> None:
    case, subject = with_partial_cotangents(name), f"{__name__}:own_terms"

    assert any(verdict.failed for verdict in judge(subject, case, pool, (equals_unsharded, gradients_equal_unsharded)))
    assert not any(
        verdict.failed
        for verdict in judge("dtensor_operators", case, pool, (equals_unsharded, gradients_equal_unsharded))
    )


def test_gate_run_averages_over_one_of_two_axes() -> None:
    found = gate_calls(4)

    assert {call.mesh_shape for call in found} == {(2, 2)}
    assert {call.operator for call in found} > set(OF_EACH_KIND)
    assert "partial(avg)" in {texts[0] for call in found for texts in call.placements}


@pytest.mark.parametrize("argument", ["ignore_index=", "reduction='sum'", "reduction='none'", "weight="])
def test_gate_run_calls_a_loss_with_each_named_argument(argument: str) -> None:
    texts = [dict(call.arguments)["call"] for call in calls("nn.functional.nll_loss")]

    assert any(argument in str(text) for text in texts)


@pytest.mark.parametrize("name", ["sum", "mean", "cumsum", "softmax"])
def test_results_of_another_dtype_are_judged_in_that_dtype(name: str) -> None:
    for call in calls(f"{name} in float64"):
        assert [result.dtype for result in call.results] == ["float64"]


def test_gate_run_calls_an_operator_on_two_of_three_processes() -> None:
    found = {call.operator: call for call in gate_calls(2) if call.members}

    assert set(found) >= HANDLED_ALONE
    assert {call.members for call in found.values()} == {(1, 2)}
    assert not {"tanh", "equal"} & set(found)


@pytest.mark.ranks
@pytest.mark.parametrize("wrong", ["rows_of_first_axis", "rows_of_own_process"])
def test_gate_run_rejects_an_embedding_that_asks_for_another_rank(wrong: str, pool: Pool) -> None:
    subject, claims = f"tests.planted.subjects:{wrong}__dtensor_operators", (equals_unsharded,)
    found = [call for call in gate_calls(2) if call.operator == "nn.functional.embedding"]

    assert any(verdict.failed for call in found for verdict in judge(subject, call, pool, claims))
    assert not any(verdict.failed for call in found for verdict in judge("dtensor_operators", call, pool, claims))


def test_gate_run_reduces_a_partial_operand_on_three_ranks() -> None:
    found = {call.operator: call.placements for call in gate_calls(3)}

    assert {(("partial(sum)",), ("replicate",)), (("replicate",), ("partial(sum)",))} & {found["add"], found["sub"]}
    assert all(any(text.startswith("partial") for (text,) in placements) for placements in found.values())
    assert {"sum", "mm", "cat", "nn.functional.mse_loss"} <= set(found) and "tanh" not in found


@pytest.mark.parametrize("name", ["add", "mul", "copy in place", "where"])
def test_gate_run_divides_one_operand_alone(name: str) -> None:
    found = [
        [number for number, (text,) in enumerate(call.placements) if text != "replicate"]
        for call in calls(name)
        if {"replicate"} < {text for (text,) in call.placements}
        and not any(text.startswith("partial") for (text,) in call.placements)
    ]

    assert [0] in found


def test_gate_run_copies_from_an_operand_in_which_the_sharded_number_is_another_dim() -> None:
    found = [call for call in calls("copy in place") if call.placements == (("shard(0)",), ("replicate",))]

    assert any(0 < len(call.operands[1]) < len(call.operands[0]) for call in found)


@pytest.mark.parametrize("name", ["norm", "roll", "flip", "layer_norm of last dims"])
def test_gate_run_divides_a_changed_or_named_dim_in_each_form(name: str) -> None:
    divided = {(call.operands, call.arguments) for call in calls(name) if placed_on_its_dims(call)}

    whole = {(form.shapes, form.arguments) for form in forms_of(name)} - divided

    assert divided and all(shape[dict(arguments)["dim"]] == 1 for (shape,), arguments in whole)


def placed_on_its_dims(call: OperatorCase) -> bool:
    """True if the operand is sharded on a dim that the call names, or on any dim if the call names none."""
    named = dict(call.arguments).get("dim", dict(call.arguments).get("dims"))
    dims = named if isinstance(named, tuple) else (named,) if isinstance(named, int) else range(len(call.operands[0]))
    return call.placements[0][0] in {f"shard({dim % len(call.operands[0])})" for dim in dims}


@pytest.mark.parametrize("name", ["scatter_add", "index_put", "where", "addcmul"])
def test_gate_run_divides_the_batch_of_all_operands_in_each_form(name: str) -> None:
    found = {
        (call.operands, call.arguments) for call in calls(name) if {*call.placements} <= {("shard(0)",), ("replicate",)}
    }
    with_rows = [form for form in forms_of(name) if len(form.shapes[0]) > 1 and form.shapes[0][0] > 1]

    assert with_rows and all((form.shapes, form.arguments) in found for form in with_rows)


@pytest.mark.parametrize("name", ["sort stable", "cumsum", "select", "softmax"])
def test_gate_run_first_names_another_dim_than_the_sharded_one(name: str) -> None:
    """A cache that ignores the dim would take the rule of the first call for the second one."""
    calls = [call for call in gate_calls(2) if call.operator == name and call.operands[0] == OWN_SHAPE]
    first, second, behind = calls

    assert first.placements == second.placements == (("shard(0)",),)
    assert not placed_on_its_dims(first) and placed_on_its_dims(second)
    assert behind.arguments == second.arguments and behind.placements == (("shard(1)",),)


@pytest.mark.parametrize("name", sorted(strategy_calls.WITHOUT_BACKWARD))
def test_gate_run_calls_a_group_norm_without_gradients(name: str) -> None:
    bare = [call for call in gate_calls(2) if call.operator == name and not call.requires_grad]

    assert {call.placements for call in bare} >= {call.placements for call in calls(name)}


@pytest.mark.parametrize("name", ["sum", "mean", "mul"])
def test_gate_run_divides_a_dim_among_both_axes_of_a_mesh(name: str) -> None:
    found = [call.placements for call in gate_calls(4) if call.operator == name]

    assert {texts[0] for placements in found for texts in placements if texts[0] == texts[1]} >= {
        "shard(0)",
        "shard(1)",
    }


@pytest.mark.parametrize("name", ["softmax", "mm", "flatten", "nn.functional.layer_norm"])
def test_gate_run_divides_two_dims_of_an_operand_among_the_axes_of_a_mesh(name: str) -> None:
    found = [texts for call in gate_calls(4) if call.operator == name for texts in call.placements]

    assert any(texts[0] != texts[1] and "replicate" not in texts for texts in found)


@pytest.mark.parametrize("name", ["convolution", "mm", "nn.functional.layer_norm", "addmm"])
def test_gate_run_calls_an_operator_with_a_gradient_for_some_operands(name: str) -> None:
    found = {call.requires_grad for call in gate_calls(2) if call.operator == name}

    assert any(graded and 0 not in graded for graded in found) and (0,) in found


@pytest.mark.parametrize("name", ["gather", "scatter"])
def test_gate_run_divides_an_index_that_is_shorter_than_the_input(name: str) -> None:
    found = {(call.operands, call.placements) for call in calls(name)}

    assert (((3, 4), (2, 4)), (("shard(0)",), ("shard(0)",))) in found


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("wrong", "operator"),
    [
        ("summed_loss_averaged", "nn.functional.cross_entropy"),
        ("first_sorted_dim_remembered", "sort stable"),
        ("larger_source_divided", "scatter from a tensor"),
        ("mean_of_own_lines", "native_group_norm"),
        ("not_written_in_place", "sub in place"),
        ("second_gradients_stop", "gradient of redistribute"),
        ("conjugation_lost", "mul of a conjugate"),
        ("chunk_shares_memory", "redistribute and write"),
        ("out_keeps_its_placement", "mean into a tensor"),
        ("norms_added_before_roots", "sum of norms"),
        ("product_of_an_empty_shard", "prod"),
    ],
)
def test_gate_run_rejects_operators_that_were_planted_blind(wrong: str, operator: str, pool: Pool) -> None:
    right = shipped()["dtensor_operators"]
    planted = replace(right, subject=f"tests.planted.subjects:{wrong}__dtensor_operators")
    of_operator = [call for call in gate_calls(2) if call.operator == operator]
    found = [call for call in of_operator if not KNOWN.forbids_run(right.subject, call)]  # others would hang or raise

    known = known_in(right.subject, planted.subject)
    with Pool() if WRONG[wrong].stays else nullcontext(pool) as own:
        first = next((call for call in found if rejects(planted, known, call, own)), None)

    assert first is not None and not rejects(right, KNOWN, first, pool)
