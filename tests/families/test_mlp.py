"""Perceptrons under sequence parallelism: the case, its exact values, and an oracle with a second opinion."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from equivtest.cases.values import draw
from equivtest.errors import Misuse
from equivtest.families.training.case import EXACT_MODES
from equivtest.families.training.sequence.case import MlpCase
from equivtest.families.training.values.exact_plan import choose_plan
from equivtest.layout import Replicate, Shard
from equivtest.oracle import expect, expect_held
from equivtest.oracle.exact import find_integers
from equivtest.tensors import DTYPES, SIGNIFICAND_BITS
from tests.families.unsharded_training import ALL, BOTH, train
from tests.unsharded import held_of

SIZES = (1, 2, 3, 5, 8, 17, 33)


def mlp_case(**fields: object) -> MlpCase:
    """Three ranks, uneven in the sequence (4 tokens of it) and in the hidden features."""
    fields = {"world_size": 3, "leading": (2, 4), "sequence_dim": 1, "in_features": 3, "hidden_features": 5,
              "out_features": 2, "biases": BOTH, "x_is_dtensor": True, "use_local_output": False,
              "requires_grad": ALL, **fields}  # fmt: skip
    return MlpCase(**fields)  # type: ignore[arg-type]


def training_case(**fields: object) -> MlpCase:
    return mlp_case(**{"optimizer": "sgd", "steps": 2, "lr": 0.25, **fields})


# ------------------------------------------------------------------------------------------------
# the case


def test_perceptron_case_has_a_shape_and_a_layout_for_every_answer() -> None:
    case = training_case(steps=3, momentum=0.5)

    assert set(case.shapes()) == {*case.given_names(), *case.answer_names()} == set(case.layouts())
    assert case.shapes()["step3.grad.in_proj.output"] == (2, 4, 5)
    assert case.shapes()["step2.momentum.out_proj.weight"] == (2, 5)


def test_layouts_of_a_perceptron_shard_the_sequence_and_the_hidden_features() -> None:
    layouts = {name: layout.placements[0] for name, layout in mlp_case().layouts().items()}

    assert layouts["x"] == layouts["output"] == layouts["grad.x"] == layouts["cotangent"] == Shard(1)
    assert layouts["capture.out_proj.input"] == layouts["grad.in_proj.output"] == Shard(2)
    assert layouts["param.in_proj.bias"] == Shard(0)
    assert layouts["param.out_proj.weight"] == Shard(1)
    assert layouts["in_proj.weight"] == layouts["grad.out_proj.bias"] == Replicate()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"leading": ()}, "leading must have 1 to 3 dims"),
        ({"leading": (1, 1, 1, 1)}, "leading must have 1 to 3 dims"),
        ({"leading": (0,), "sequence_dim": 0}, "leading must have 1 to 3 dims of at least 1"),
        ({"sequence_dim": 2}, "sequence_dim must be one of the 2 leading dims"),
        ({"hidden_features": 0}, "hidden_features must be in 1..4096, got 0"),
        ({"activation": "gelu"}, "gelu rounds: use mode real, not dense"),
        ({"biases": ("out_proj", "in_proj")}, "biases must list some of in_proj, out_proj in this order"),
        ({"biases": ()}, "requires_grad must list some of x, in_proj.weight, out_proj.weight in this order"),
        ({"x_is_dtensor": False}, "set x_is_dtensor=True"),
        ({"steps": 2}, "steps must be 1 without an optimizer"),
        ({"optimizer": "sgd"}, "steps must be in 2..16 with an optimizer, got 1"),
        ({"optimizer": "sgd", "steps": 2, "requires_grad": ("x",)}, "an optimizer needs a parameter"),
        ({"optimizer": "sgd", "steps": 2, "lr": 0.0}, "lr must be above 0"),
        ({"optimizer": "sgd", "steps": 2, "weight_decay": 2.0}, "weight_decay must be in 0..1"),
        ({"optimizer": "sgd", "steps": 2, "momentum": 1.0}, "momentum must be at least 0 and below 1"),
        ({"optimizer": "adamw", "steps": 2, "momentum": 0.5}, "only SGD has a momentum"),
        ({"optimizer": "adamw", "steps": 2, "dtype": "float16"}, "eps of 1e-8 is zero in float16"),
        ({"optimizer": "sgd", "steps": 2, "values": (("wide-x", 0),)}, "leaves no bits for an update"),
    ],
)
def test_error_for_an_invalid_case_names_the_invalid_field(fields: dict[str, object], message: str) -> None:
    with pytest.raises(Misuse, match=message.replace("(", r"\(")):
        mlp_case(**fields)


# ------------------------------------------------------------------------------------------------
# values and oracle


@pytest.mark.parametrize("mode", EXACT_MODES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_of_a_perceptron_use_nearly_all_bits_of_the_significand(mode: str, dtype: str) -> None:
    """Within three bits of the significand, for sizes from 1 to 33."""
    for size in SIZES:
        case = mlp_case(leading=(size,), sequence_dim=0, in_features=5, hidden_features=size, dtype=dtype,
                        values=((mode, size),))  # fmt: skip
        bits_used = max(expect(case, 0).bits_used.values())
        assert SIGNIFICAND_BITS[dtype] - 3 <= bits_used <= SIGNIFICAND_BITS[dtype], case


def test_magnitudes_are_chosen_such_that_no_sum_exceeds_the_limit() -> None:
    for limit in (2**8, 2**11, 2**24, 2**53):
        plan = choose_plan(99, 33, 33, 33, 64, limit, "dense", has_b1=True, small=False)
        assert plan.fits(limit)
        assert min(plan.cap1, plan.cap2, plan.cap_g) >= 1


def test_dense_values_give_every_parameter_and_x_a_nonzero_gradient() -> None:
    for seed in range(20):
        for size in (1, 2, 5):
            case = mlp_case(leading=(size,), sequence_dim=0, hidden_features=size, values=(("dense", seed),))
            tensors = expect(case, 0).tensors
            assert all(bool(tensors[f"grad.{name}"].value.any()) for name in ALL[1:]), case


def test_bias_of_out_proj_is_a_multiple_of_the_world_size() -> None:
    """DTensor divides it by that."""
    for seed in range(5):
        bias = draw(mlp_case(dtype="bfloat16", values=(("dense", seed),)), 0)["out_proj.bias"]
        assert bool((find_integers("bias", bias).integers % 3 == 0).all())


def test_each_step_has_different_inputs_and_cotangents() -> None:
    for mode in ("dense", "real"):
        values = draw(training_case(values=((mode, 0),)), 0)
        assert not torch.equal(values["x"], values["step2.x"])
        assert not torch.equal(values["cotangent"], values["step2.cotangent"])


# ------------------------------------------------------------------------------------------------
# training


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("momentum", [0.0, 0.5])
@pytest.mark.parametrize("weight_decay", [0.0, 0.25])
def test_two_steps_of_sgd_are_exact_in_float32_and_float64(dtype: str, momentum: float, weight_decay: float) -> None:
    """On two ranks: the bias of three would have to stay a multiple of three."""
    case = training_case(world_size=2, dtype=dtype, momentum=momentum, weight_decay=weight_decay)
    found = train(case, DTYPES[dtype])
    expected = expect_held(case, 0, held_of(case, found)).tensors

    assert all(tensor.allowed is None for tensor in expected.values())
    assert all(torch.equal(expected[name].value, found[name].double()) for name in expected)


def test_wrong_state_after_one_step_does_not_fail_the_next_step() -> None:
    case = training_case(world_size=2)
    right = train(case, torch.float32)
    wrong = dict(right, **{"step1.param.in_proj.weight": right["step1.param.in_proj.weight"] + 1})
    expected = expect_held(case, 0, held_of(case, wrong)).tensors

    assert torch.equal(expected["step1.param.in_proj.weight"].value, right["step1.param.in_proj.weight"].double())
    moved = (draw(case, 0)["step2.x"].double() @ torch.ones(3, 5, dtype=torch.float64)).reshape(2, 4, 5)
    difference = expected["step2.capture.in_proj.output"].value - right["step2.capture.in_proj.output"].double()
    assert torch.equal(difference, moved)


def test_first_step_on_exact_data_ignores_the_recorded_activations_of_the_ranks() -> None:
    case = mlp_case()
    right = train(case, torch.float32)
    wrong = dict(right, **{"capture.out_proj.input": right["capture.out_proj.input"] * float("nan")})

    expected = expect_held(case, 0, held_of(case, wrong)).tensors
    assert torch.equal(expected["output"].value, right["output"].double())


def test_oracle_uses_the_reference_for_a_tensor_that_a_rank_lacks() -> None:
    case = training_case(world_size=2)
    held = held_of(case, train(case, torch.float32))
    without = {rank: {n: p for n, p in tensors.items() if rank == 0 or "step1.param" not in n}
               for rank, tensors in held.items()}  # fmt: skip
    misplaced = {**held, 1: {name: dataclasses.replace(placed, layout=case.layouts()["in_proj.weight"])
                             if "step1.param" in name else placed for name, placed in held[1].items()}}  # fmt: skip
    right = expect_held(case, 0, held).tensors

    for broken in (without, misplaced):
        tensors = expect_held(case, 0, broken).tensors
        assert all(torch.equal(tensors[name].value, right[name].value) for name in right)
