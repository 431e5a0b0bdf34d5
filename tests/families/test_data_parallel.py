"""Perceptrons under data parallelism: the case, its exact values, an oracle with a second opinion, our ZeRO-3."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from equivtest.cases.values import draw
from equivtest.errors import Misuse
from equivtest.families.training.case import EXACT_MODES
from equivtest.families.training.data_parallel.case import STYLES, DataParallelCase
from equivtest.families.training.data_parallel.case_refused import RefusedShardingCase
from equivtest.families.training.subject import Mlp
from equivtest.families.training.zero3.subject.layer import Layer
from equivtest.families.zero3.fetch.subject import Fetch, PartitionedParameter
from equivtest.layout import Flat, Replicate, Shard
from equivtest.oracle import expect, expect_held
from equivtest.oracle.averages import Averages, reciprocal_is_near
from equivtest.oracle.collectives import expected_collectives
from equivtest.oracle.exact import InexactData
from equivtest.oracle.operations import Operations
from equivtest.tensors import DTYPES
from equivtest.verdicts.elements import is_too_wide
from tests.families.refusing import refuses
from tests.families.unsharded_training import ALL, BOTH, train
from tests.unsharded import held_of


def data_parallel_case(**fields: Any) -> DataParallelCase:
    """Three ranks, two micro-batches of two rows each, parameters of 15, 5, 10 and 2 elements."""
    return DataParallelCase(**{"world_size": 3, "leading": (2,), "micro_batches": 2, "in_features": 3,
                               "hidden_features": 5, "out_features": 2, "biases": BOTH, "requires_grad": ALL,
                               **fields})  # fmt: skip


@st.composite
def exact_cases(draw_from: st.DrawFn) -> DataParallelCase:
    sizes = st.sampled_from((1, 2, 3, 5, 8, 17, 33))
    return data_parallel_case(
        world_size=draw_from(st.sampled_from((1, 2, 3, 4, 5, 6, 8))),
        style=draw_from(st.sampled_from(STYLES)),
        leading=(draw_from(st.sampled_from((1, 2, 3))),),
        micro_batches=draw_from(st.sampled_from((1, 2, 3))),
        in_features=draw_from(sizes),
        hidden_features=draw_from(sizes),
        out_features=draw_from(sizes),
        dtype=draw_from(st.sampled_from(tuple(DTYPES))),
        values=((draw_from(st.sampled_from(EXACT_MODES)), draw_from(st.integers(0, 2**40))),),
    )


# ------------------------------------------------------------------------------------------------
# the case


@pytest.mark.parametrize(("style", "placement"), [("ddp", Replicate()), ("fsdp2", Shard(0)), ("zero3", Flat(6))])
def test_style_determines_layouts_of_parameters_gradients_and_states(style: str, placement: object) -> None:
    case = data_parallel_case(style=style, optimizer="sgd", steps=2, momentum=0.5)
    layouts = {name: layout.placements[0] for name, layout in case.layouts().items()}

    names = ("param.in_proj.bias", "grad.in_proj.bias", "step2.grad.in_proj.bias", "step1.momentum.in_proj.bias")
    assert {layouts[name] for name in names} == {placement}
    assert layouts["x"] == layouts["output"] == layouts["grad.in_proj.output"] == Shard(0)


def test_weight_sharded_by_columns_has_gradients_and_states_sharded_on_dim_1() -> None:
    case = data_parallel_case(style="fsdp2", by_columns=("in_proj.weight",), optimizer="sgd", steps=2, momentum=0.5)
    layouts = {name: layout.placements[0] for name, layout in case.layouts().items()}

    names = ("param.in_proj.weight", "step2.grad.in_proj.weight", "step1.momentum.in_proj.weight")
    assert {layouts[name] for name in names} == {Shard(1)}
    assert layouts["param.in_proj.bias"] == layouts["param.out_proj.weight"] == Shard(0)


def test_batch_covers_all_ranks_and_micro_batches() -> None:
    case = data_parallel_case(leading=(2, 5))

    assert case.shapes()["x"] == (3 * 2 * 2, 5, 3)
    assert case.shapes()["capture.out_proj.input"] == (12, 5, 5)


def test_training_case_requires_frozen_parameters_as_answers_after_each_step() -> None:
    case = data_parallel_case(requires_grad=("out_proj.bias",), optimizer="sgd", steps=2, momentum=0.5)

    assert "step2.param.in_proj.weight" in case.answer_names()
    assert "step2.momentum.in_proj.weight" not in case.answer_names()


test_error_for_an_invalid_case_names_the_invalid_field = refuses(
    data_parallel_case,
    ({"micro_batches": 0}, "micro_batches must be in 1..8, got 0"),
    ({"requires_grad": ("x",)}, "needs a parameter in requires_grad"),
    (
        {"style": "fsdp2", "by_columns": ("in_proj.bias",)},
        "by_columns must list some of in_proj.weight",
    ),
    ({"by_columns": ("in_proj.weight",)}, "leave by_columns out for 'ddp'"),
    ({"style": "fsdp2", "by_columns": ("out_proj.weight",)}, "out_proj.weight has 5 columns, which 3 ranks cannot"),
    ({"records": True}, "set records=False"),
    ({"style": "zero3", "records": True}, "set records=False"),
    (
        {"optimizer": "sgd", "steps": 3, "stopped_steps": (1,)},
        r"stopped_steps must list some of 2..3 in this order",
    ),
    ({"optimizer": "sgd", "steps": 3, "stopped_steps": (3, 2)}, r"stopped_steps must list some of 2..3"),
    (
        {"optimizer": "sgd", "steps": 2, "stopped_steps": (2,), "requires_grad": ("in_proj.weight",)},
        "stopped_steps need a parameter of out_proj",
    ),
    ({"clip_norm": 1.0}, "gradients are clipped before an update: set optimizer"),
    ({"optimizer": "sgd", "steps": 2, "clip_norm": -1.0}, "clip_norm must be at least 0 and finite"),
    ({"optimizer": "sgd", "steps": 2, "norm_type": "inf"}, "norm_type needs clipping: set clip_norm"),
    ({"optimizer": "sgd", "steps": 2, "clip_norm": 1.0, "norm_type": "3"}, "norm_type must be one of 2, 1, inf"),
)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"style": "ddp"}, "a case with a misfit must have style='fsdp2', got 'ddp'"),
        ({"by_columns": ("in_proj.weight",)}, "leave by_columns out"),
        ({"misfit": "uneven", "in_features": 6}, "6 columns on 3 ranks are even, which FSDP2 does not refuse"),
        ({"misfit": "not_contiguous", "in_features": 1}, "a weight of one row or column is always contiguous"),
    ],
)
def test_case_of_a_refused_sharding_requires_a_weight_that_fsdp2_cannot_shard(
    fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(Misuse, match=message):
        RefusedShardingCase(**{"world_size": 3, **fields})


# ------------------------------------------------------------------------------------------------
# activation checkpointing


def fetches(**fields: Any) -> list[tuple[str, int]]:
    case = data_parallel_case(style="zero3", fetch="all_gather", micro_batches=1, records=True, **fields)
    return [(call.phase, call.size_bytes) for call in expected_collectives(case, 0) if call.kind == "all_gather"]


def test_recomputing_the_hidden_activation_gathers_in_proj_a_third_time() -> None:
    """Each of three ranks has 5 + 2 of in_proj's 15 and 5 elements, and 4 + 1 of out_proj's 10 and 2."""
    once = [("forward", 28), ("forward", 20), ("backward", 20), ("backward", 28)]

    assert fetches() == fetches(checkpointed="wrapped") == fetches(checkpointed="in_proj") == once
    assert fetches(checkpointed="hidden") == [*once, ("backward", 28)]


def test_backward_that_stops_at_the_hidden_activation_fetches_no_weight_again() -> None:
    fields = {"checkpointed": "hidden", "optimizer": "sgd", "steps": 2, "stopped_steps": (2,)}

    assert len(fetches(**fields)) == 5 + 3
    assert len(fetches(checkpointed="hidden", requires_grad=("out_proj.weight",))) == 3


@pytest.mark.parametrize("checkpointed", ["hidden", "wrapped", "in_proj", "out_proj"])
def test_checkpointed_layer_runs_again_in_the_backward(checkpointed: str) -> None:
    case = data_parallel_case(checkpointed=checkpointed)
    model, runs = Mlp(case, draw(case, 0)), Counter[str]()
    for name in ("in_proj", "out_proj"):
        model.get_submodule(name).register_forward_pre_hook(lambda _module, _args, name=name: runs.update([name]))
    model.wrap()
    output = model(torch.ones(2, 3))
    assert runs == {"in_proj": 1, "out_proj": 1}
    output.sum().backward()

    again = {"hidden": {"in_proj"}, "wrapped": {"in_proj", "out_proj"}}.get(checkpointed, {checkpointed})
    assert {name for name, count in runs.items() if count == 2} == again


# ------------------------------------------------------------------------------------------------
# values and oracle


@given(case=exact_cases())
@settings(max_examples=40, derandomize=True, database=None, deadline=None)
def test_dividing_each_ranks_gradient_before_the_sum_gives_the_exact_average(case: DataParallelCase) -> None:
    """Like DDP, in the case's own dtype, and then reduces the products."""
    right, given_values = expect(case, 0).tensors["grad.out_proj.bias"].value, draw(case, 0)
    shares = given_values["cotangent"].chunk(case.world_size)
    averaged = torch.stack([share.sum(0).mul(1.0 / case.world_size) for share in shares]).sum(0)

    assert torch.equal(averaged.double(), right)


def test_reciprocal_of_a_world_size_is_inaccurate_only_for_seven_in_float32() -> None:
    assert [w for w in range(1, 10) if not reciprocal_is_near(w, "float32")] == [7]
    assert all(reciprocal_is_near(w, "float64") for w in range(1, 10))


def test_gradients_on_seven_ranks_in_float32_are_judged_within_a_bound() -> None:
    """DDP is one rounding off there, however exact the gradients."""
    tensors = expect(data_parallel_case(world_size=7), 0).tensors

    assert tensors["grad.in_proj.weight"].allowed is not None
    assert tensors["output"].allowed is None


def test_expected_update_on_seven_ranks_starts_from_the_gradients_of_the_ranks() -> None:
    case = data_parallel_case(world_size=7, optimizer="sgd", steps=2, requires_grad=("out_proj.bias",))
    held = train(case, torch.float32)
    right = held["grad.out_proj.bias"]
    held["grad.out_proj.bias"] = torch.nextafter(right, right + 1)

    expected = expect_held(case, 0, held_of(case, held)).tensors["step1.param.out_proj.bias"].value
    moved = held["param.out_proj.bias"].double() - 0.25 * held["grad.out_proj.bias"].double()
    assert torch.equal(expected, moved)


def test_sum_that_the_world_size_does_not_divide_raises_inexact_data() -> None:
    averages = Averages(Operations("float32", 3, must_be_exact=True), 3, 1)
    with pytest.raises(InexactData, match="no multiples of 3"):
        averages.total(torch.ones(3, 1, dtype=torch.float64))


def by_rank(rows: Sequence[torch.Tensor], scale: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Each share's gradient of a linear layer, in its own dtype, scaled and then added in order."""
    total = scale(rows[0].T @ rows[0])
    for own in rows[1:]:
        total = total + scale(own.T @ own)
    return total


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ranks", [2, 3, 5, 7])
def test_averages_of_real_numbers_are_within_the_bound_however_they_are_divided(dtype: str, ranks: int) -> None:
    for seed in range(5):
        batch = torch.randn(4 * ranks, 3, generator=torch.Generator().manual_seed(seed)).to(DTYPES[dtype])
        found = Averages(Operations(dtype, ranks, must_be_exact=False, may_be_exact=False), ranks, 1).product(
            batch.double().T, batch.double()
        )
        rows = batch.chunk(ranks)
        tries = (by_rank(rows, lambda own: own * (1.0 / ranks)), by_rank(rows, lambda own: own / 2) / (ranks / 2),
                 by_rank(rows, lambda own: own) / ranks)  # fmt: skip
        for averaged in tries:
            assert found.allowed is not None
            assert bool(((averaged.double() - found.value).abs() <= found.allowed).all())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_sum_of_micro_batches_is_within_the_bound_in_any_order(dtype: str, ranks: int) -> None:
    worst = 0.0
    for seed in range(20):
        batch = torch.randn(ranks * 3 * 2, 4, generator=torch.Generator().manual_seed(seed)).to(DTYPES[dtype])
        operations = Operations(dtype, ranks, must_be_exact=False, may_be_exact=False)
        found = Averages(operations, ranks, 3).product(batch.double().T, batch.double().flip(1))
        assert found.allowed is not None
        products = [[own.T @ own.flip(1) for own in rank.chunk(3)] for rank in batch.chunk(ranks)]
        on_ranks = [in_order(own) for own in products]
        across = [in_order([own[at] for own in products]) for at in range(3)]
        divided = in_order([in_order([own[at] / ranks for own in products]) for at in range(3)])
        for averaged in (in_order(on_ranks) / ranks, in_order(across) / ranks, divided):
            worst = max(worst, float(((averaged.double() - found.value).abs() / found.allowed).max()))
        doubled = in_order([*on_ranks, products[0][0]]) / ranks
        assert bool(((doubled.double() - found.value).abs() > found.allowed).any())
    assert worst <= 1
    assert worst > 0.2 or dtype in ("float32", "float64")


@pytest.mark.parametrize("dtype", DTYPES)
def test_sum_that_groups_of_two_ranks_begin_is_within_the_bound(dtype: str) -> None:
    for seed in range(20):
        batch = torch.randn(4 * 3 * 2, 4, generator=torch.Generator().manual_seed(seed)).to(DTYPES[dtype])
        operations = Operations(dtype, 4, must_be_exact=False, may_be_exact=False)
        found = Averages(operations, 4, 3, scattered=2).product(batch.double().T, batch.double().flip(1))
        assert found.allowed is not None
        products = [[own.T @ own.flip(1) for own in rank.chunk(3)] for rank in batch.chunk(4)]
        groups = [
            in_order([in_order([products[at][number], products[at + 1][number]]) for number in range(3)])
            for at in (0, 2)
        ]
        last_alone = in_order([products[at][2] for at in range(4)]) / 4
        assert bool(((in_order(groups) / 4 - found.value).abs() <= found.allowed).all())
        assert bool(((last_alone - found.value).abs() > found.allowed).any())


def in_order(operands: Sequence[torch.Tensor]) -> torch.Tensor:
    """Their sum, rounded after each addition."""
    total = operands[0]
    for operand in operands[1:]:
        total = total + operand
    return total


def test_average_of_zero_gradients_is_exactly_zero() -> None:
    averages = Averages(Operations("float16", 3, must_be_exact=False, may_be_exact=False), 3, 2)
    found = averages.product(torch.zeros(2, 6, dtype=torch.float64), torch.ones(6, 1, dtype=torch.float64))

    assert found.allowed is not None and not found.allowed.any()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
@pytest.mark.parametrize(("world_size", "micro_batches"), [(2, 1), (3, 2), (4, 3)])
def test_bounds_on_two_real_features_are_narrow_for_nearly_all_seeds(
    dtype: str, world_size: int, micro_batches: int
) -> None:
    """Up to 36 tokens behind each element of a gradient, in bfloat16 too."""
    case = DataParallelCase(
        world_size=world_size, leading=(3,), micro_batches=micro_batches, in_features=2, hidden_features=2,
        out_features=2, biases=BOTH, requires_grad=ALL, dtype=dtype, values=tuple(("real", seed) for seed in range(40)),
    )  # fmt: skip
    open_ = [seed for seed in range(40) if any(map(is_too_wide, expect(case, seed).tensors.values()))]

    assert len(open_) <= 1


@pytest.mark.parametrize("mode", ["dense", "real"])
@pytest.mark.parametrize("seed", range(5))
def test_training_does_not_overflow_float16(mode: str, seed: int) -> None:
    """Products of the second step's parameters would, had the first update its whole eleven bits."""
    case = DataParallelCase(
        world_size=4, leading=(5, 3), in_features=10, hidden_features=33, out_features=10, biases=BOTH,
        requires_grad=ALL, dtype="float16", optimizer="sgd", steps=2, lr=0.5, momentum=0.9, values=((mode, seed),),
    )  # fmt: skip
    expected = expect(case, 0).tensors.values()

    assert all(tensor.allowed is None or bool(tensor.allowed.isfinite().all()) for tensor in expected)


def test_step_that_stops_at_the_hidden_activation_leaves_in_proj_unchanged() -> None:
    case = data_parallel_case(optimizer="sgd", steps=3, momentum=0.5, weight_decay=0.25, stopped_steps=(2,))
    expected = expect(case, 0).tensors

    for state in ("param", "momentum"):
        before, after = (expected[f"step{step}.{state}.in_proj.weight"] for step in (1, 2))
        assert torch.equal(before.value, after.value) and after.allowed is None
        assert not torch.equal(before.value, expected[f"step3.{state}.in_proj.weight"].value)
    assert "step2.grad.in_proj.weight" not in expected and "step2.grad.x" not in expected
    assert case.num_updates("in_proj.weight", 3) == 2
    assert case.num_updates("out_proj.weight", 3) == 3


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_two_steps_of_sgd_are_exact_in_float32(world_size: int) -> None:
    case = data_parallel_case(world_size=world_size, optimizer="sgd", steps=2, momentum=0.5, weight_decay=0.25)
    found = train(case, torch.float32)
    expected = expect_held(case, 0, held_of(case, found)).tensors

    for name in (name for name in expected if not name.startswith("step2.grad")):
        assert expected[name].allowed is None, name
        assert torch.equal(expected[name].value, found[name].double()), name


# ------------------------------------------------------------------------------------------------
# a layer of our own ZeRO-3, on one rank


def fetch_here(parameters: Sequence[PartitionedParameter], mesh: object) -> Fetch:
    def finish() -> None:
        for parameter in parameters:
            parameter.whole = parameter.partition.view(parameter.shape)

    return Fetch(parameters, None, finish)


def layer_of(module: nn.Module) -> Layer:
    mesh: Any = SimpleNamespace(size=lambda: 1, get_local_rank=lambda: 0)
    return Layer(module, mesh, fetch_here, padding=float("nan"))


def test_parameters_have_elements_only_between_fetch_and_release() -> None:
    module = nn.Linear(2, 3)
    layer = layer_of(module)

    sizes = [module.weight.numel()]
    layer.fetch()
    sizes.append(module.weight.numel())
    layer.release()
    assert [*sizes, module.weight.numel()] == [0, 6, 0]


def test_releasing_a_parameter_that_is_not_available_raises() -> None:
    with pytest.raises(RuntimeError, match="weight is NOT_AVAILABLE; only an AVAILABLE parameter can be released"):
        layer_of(nn.Linear(1, 1)).release()


def test_backward_uses_the_most_recently_fetched_parameter() -> None:
    module = nn.Linear(2, 3, bias=False)
    layer = layer_of(module)
    layer.fetch()
    saved = layer.pack(module.weight.t())
    layer.release()

    with pytest.raises(RuntimeError, match="only an AVAILABLE parameter can be used"):
        layer.unpack(saved)
    layer.partitioned["weight"].partition.fill_(7.0)
    layer.fetch()
    assert torch.equal(layer.unpack(saved), torch.full((2, 3), 7.0))


def test_features_of_later_steps_have_mostly_one_sign() -> None:
    case = DataParallelCase(
        world_size=2, style="ddp", leading=(64,), in_features=5, out_features=3, optimizer="sgd", steps=3
    )
    given = draw(case, 0)
    for name in ("x", "cotangent"):
        means = [given[f"step{step}.{name}"].sign().mean(0).abs() for step in (2, 3)]
        assert float(torch.stack(means).min()) > 0.5


def test_weight_of_one_element_is_drawn_larger_than_a_step_of_adamw() -> None:
    case = DataParallelCase(
        world_size=2, style="ddp", values=tuple(("real", seed) for seed in range(32)), optimizer="adamw", steps=2
    )
    for index in range(len(case.values)):
        weights = [draw(case, index)[name] for name in ("in_proj.weight", "out_proj.weight")]
        assert all(float(weight.abs().min()) >= 1 for weight in weights)
