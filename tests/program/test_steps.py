"""Modules that are trained: updates by any optimizer, and custom steps over parts of a batch."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import find

from equivtest.cases.case import at_step, in_one_step
from equivtest.cases.values import draw
from equivtest.errors import Misuse
from equivtest.module import ids, module_property, targets
from equivtest.oracle import expect
from equivtest.programs.case import PARTS_OF_WHOLE, ModuleCase
from equivtest.programs.inputs import make_whole_numbers
from equivtest.programs.reference import call_builder, with_parameters
from equivtest.programs.steps import called_optimizer, updated
from equivtest.property import Space
from equivtest.ranks.pool import Pool
from equivtest.tensors import DTYPES
from equivtest.verdicts.judging import judge
from equivtest.verdicts.verdict import Verdict
from tests.programs import steps as programs

HERE = "tests.programs.steps:"
SUBJECT = "equivtest.programs.examples.plans:"
TOKEN_MEAN = "equivtest.programs.examples.token_mean:"
PERCEPTRON: dict[str, Any] = {
    "build": f"{HERE}perceptron",
    "parallelize": f"{HERE}columns_and_rows",
    "x_shape": (3, 3),
    "values": (("real", 0),),
    "world_size": 2,
    "optimizer": f"{HERE}adamw",
    "steps": 2,
}
TOKENS: dict[str, Any] = {
    "build": "equivtest.programs.examples.next_token:next_token",
    "parallelize": f"{SUBJECT}data_parallel",
    "inputs": (("ids", "ids(7)", ("batch", "seq")), ("targets", "targets(7, -100)", ("batch", "seq"))),
    "sizes": (("batch", 5), ("seq", 3)),
    "values": (("real", 0), ("real", 1)),
    "batch": PARTS_OF_WHOLE,
    "optimizer": f"{TOKEN_MEAN}adamw",
    "step": f"{TOKEN_MEAN}token_mean",
    "steps": 2,
    "micro_batches": 2,
    "max_norm": 0.5,
}


def failed(case: ModuleCase, pool: Pool) -> list[Verdict]:
    return [verdict for verdict in judge("module", case, pool) if verdict.kind != "holds"]


@pytest.mark.ranks
@pytest.mark.parametrize(("world_size", "dtype"), [(1, "float32"), (2, "float64"), (3, "float32")])
@pytest.mark.parametrize("parallelize", ["data_parallel", "fully_sharded"])
def test_right_step_with_a_loss_averaged_over_all_tokens_passes(
    pool: Pool, parallelize: str, world_size: int, dtype: str
) -> None:
    made: dict[str, Any] = {**TOKENS, "parallelize": f"{SUBJECT}{parallelize}"}
    case = ModuleCase(world_size=world_size, dtype=dtype, **made)

    assert failed(case, pool) == []


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("wrong", "world_size", "first"),
    [
        ("MeanOfMeans", 1, "grad."),
        ("MeanOfMeans", 3, "grad."),
        ("OwnReported", 2, "output.loss"),
        ("GradientsKept", 2, "step2.grad."),
        ("OwnNorm", 2, "output.total_norm"),
        ("FirstReduced", 2, "grad."),
    ],
)
def test_message_on_a_wrong_step_names_the_first_wrong_tensor(
    pool: Pool, wrong: str, world_size: int, first: str
) -> None:
    made = {**TOKENS, "step": f"tests.defects.programs.token_mean:step_{wrong}"}
    made["parallelize"] = f"{SUBJECT}fully_sharded"
    verdicts = failed(ModuleCase(world_size=world_size, **made), pool)

    assert any(each.judgement.mismatches[0].tensor.startswith(first) for each in verdicts if each.failed)


@pytest.mark.ranks
@pytest.mark.parametrize("how", ["", "_foreach"])
@pytest.mark.parametrize("name", programs.OPTIMIZERS)
def test_right_training_passes_with_each_optimizer_of_torch(pool: Pool, name: str, how: str) -> None:
    assert failed(ModuleCase(**{**PERCEPTRON, "optimizer": f"{HERE}{name}{how}"}), pool) == []


CODES = [
    (name, f"{name}{how}", dtype)
    for name, how, dtype in itertools.product(
        programs.OPTIMIZERS, ("", "_foreach", "_fused"), ("float32", "float64", "bfloat16")
    )
    if hasattr(programs, f"{name}{how}") and (name, how, dtype) != ("asgd", "_foreach", "float64")
]
"""All optimizers except the one of `test_asgd_with_foreach_differs_from_the_oracle_by_a_float32_rounding`."""


@pytest.mark.parametrize(("name", "code", "dtype"), CODES)
def test_updates_of_torchs_optimizers_are_within_the_oracles_bounds(name: str, code: str, dtype: str) -> None:
    case = ModuleCase(**{**PERCEPTRON, "optimizer": f"{HERE}{name}", "dtype": "float32", "steps": 1})
    case = replace(case, dtype=dtype, by_parts=dtype == "bfloat16")

    num_steps = 7 if name == "radam" else 3  # RAdam rectifies from step 6 on
    assert worst_of(case, f"{HERE}{code}", num_steps) <= 1


def test_asgd_with_foreach_differs_from_the_oracle_by_a_float32_rounding() -> None:
    case = ModuleCase(**{**PERCEPTRON, "optimizer": f"{HERE}asgd", "dtype": "float64", "steps": 1})

    assert worst_of(case, f"{HERE}asgd_foreach", num_steps=2) > 1e6


def worst_of(case: ModuleCase, real: str, num_steps: int) -> float:
    """The largest share of its allowance that an update of torch's own takes."""
    from equivtest.programs.oracle.steps import Optimizer

    source = torch.Generator().manual_seed(3)
    parameters = {name: tensor for name, tensor in draw(case, 0).items() if name in case.parameter_names()}
    module = with_parameters(call_builder(case.build).to(DTYPES[case.dtype]), parameters)
    optimizer, oracle, shares = called_optimizer(real, module), Optimizer(case, parameters), []
    for _ in range(num_steps):
        before = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
        gradients = {
            name: torch.randn(tensor.shape, generator=source).to(tensor.dtype) for name, tensor in before.items()
        }
        for name, parameter in module.named_parameters():
            parameter.grad = gradients[name].clone()
        optimizer.step()
        for name, right in oracle.update(before, gradients).items():
            error = (module.get_parameter(name).detach().double() - right.value).abs()
            assert right.allowed is not None
            shares.append(float(torch.where(error == 0, 0.0, error / right.allowed).max()))
    return max(shares)


@pytest.mark.ranks
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_update_that_is_smaller_on_one_rank_fails_and_names_step_and_rank(pool: Pool, dtype: str) -> None:
    verdicts = failed(ModuleCase(**{**PERCEPTRON, "optimizer": f"{HERE}halving", "dtype": dtype}), pool)
    training = [verdict for verdict in verdicts if verdict.claim == "trains_like_unsharded"]

    assert training and training[0].judgement.mismatches[0].tensor.startswith("step1.param.")
    assert training[0].judgement.mismatches[0].rank == 1


@pytest.mark.ranks
def test_gradients_clipped_by_the_norm_of_all_gradients_pass(pool: Pool) -> None:
    for norm_type in (1.0, 2.0, float("inf")):
        case = ModuleCase(**{**PERCEPTRON, "max_norm": 0.1, "norm_type": norm_type})
        assert failed(case, pool) == []


@pytest.mark.ranks
def test_frozen_parameter_is_not_updated(pool: Pool) -> None:
    case = ModuleCase(**{**PERCEPTRON, "build": f"{HERE}frozen_first"})
    expected = expect(case, 0).tensors

    assert failed(case, pool) == []
    assert expected["step2.param.0.weight"].allowed is None
    assert torch.equal(expected["step2.param.0.weight"].value, draw(case, 0)["0.weight"].double())


@pytest.mark.ranks
def test_right_training_of_a_deep_module_passes_by_parts(pool: Pool) -> None:
    case = ModuleCase(
        build="equivtest.programs.examples.decoder:decoder",
        parallelize="equivtest.programs.examples.decoder_plan:heads_and_hidden_divided",
        x_shape=(1, 3, 24),
        world_size=2,
        dtype="bfloat16",
        by_parts=True,
        values=(("real", 0),),
        optimizer=f"{HERE}large",
    )
    assert failed(case, pool) == []
    assert "step2.boundary.layers.1.mlp.down" in replace(case, steps=2).answer_names()


def test_optimizer_update_smaller_than_its_bound_is_inconclusive() -> None:
    case = ModuleCase(**{**PERCEPTRON, "optimizer": f"{HERE}tiny"})

    assert "the update is smaller than" in expect(case, 0).tensors["step1.param.0.weight"].derivation


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"steps": 0}, "steps must be at least 1, got 0"),
        ({"optimizer": ""}, "2 steps need an optimizer"),
        ({"micro_batches": 2}, "2 micro_batches need a step"),
        ({"max_norm": -1.0}, "max_norm must be 0 or more"),
        ({"norm_type": 3.0}, "norm_type must be one of 1.0, 2.0, inf, got 3.0"),
        ({"values": (("dense", 0),)}, "steps are judged on real values"),
        ({"batch": PARTS_OF_WHOLE}, "batch='parts of the whole' needs a step"),
        ({"step": f"{TOKEN_MEAN}token_mean"}, "a step needs a loss"),
        ({"step": f"{TOKEN_MEAN}token_mean", "batch": "sum of parts"}, "a step needs batch='whole'"),
        ({"build": f"{HERE}with_batch_norm"}, "buffer 1.running_mean changes from step to step"),
        ({"build": f"{HERE}with_total_norm", "max_norm": 1.0}, "returns an output total_norm, but a step"),
        ({**TOKENS, "build": f"{HERE}loss_alone"}, "must return its loss under a name, {'loss': loss}"),
    ],
)
def test_invalid_training_settings_raise_misuse(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(Misuse, match=re.escape(message)):
        ModuleCase(**{**PERCEPTRON, **fields})


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        ("no_optimizer", "must give a torch.optim.Optimizer, got Sequential"),
        ("adafactor", "no bound is known for item()"),
        ("lbfgs", "cannot be followed"),
    ],
)
def test_optimizer_that_the_oracle_cannot_follow_is_refused(optimizer: str, message: str) -> None:
    with pytest.raises(Misuse) as refused:
        expect(ModuleCase(**{**PERCEPTRON, "optimizer": f"{HERE}{optimizer}"}), 0)

    assert message in str(refused.value)


@pytest.mark.ranks
def test_step_that_updates_parameters_without_an_optimizer_is_rejected(pool: Pool) -> None:
    case = ModuleCase(world_size=2, **{**TOKENS, "optimizer": "", "step": f"{HERE}updates_by_itself", "steps": 1})
    tensors = {each.judgement.mismatches[0].tensor for each in failed(case, pool) if each.judgement.mismatches}

    assert "param.embedding.weight" in tensors


@pytest.mark.ranks
def test_large_update_in_place_of_a_tiny_update_is_rejected(pool: Pool) -> None:
    made = {**TOKENS, "optimizer": f"{HERE}tiny", "step": f"{HERE}adds_much", "steps": 1}
    verdicts = failed(ModuleCase(world_size=1, **made), pool)

    assert ("trains_like_unsharded", "value") in [(verdict.claim, verdict.kind) for verdict in verdicts]


@pytest.mark.ranks
def test_rank_with_an_empty_shard_of_an_unused_parameter_needs_no_gradient(pool: Pool) -> None:
    made = {**PERCEPTRON, "build": f"{HERE}with_extra", "parallelize": f"{HERE}extra_divided"}

    assert failed(ModuleCase(**made), pool) == []


@pytest.mark.ranks
def test_clipping_a_mix_of_plain_and_dtensor_gradients_raises_misuse(pool: Pool) -> None:
    made = {**PERCEPTRON, "parallelize": f"{HERE}only_columns", "max_norm": 1.0}

    assert "takes either plain parameters or DTensors of one mesh" in judge_misused(ModuleCase(**made), pool)


def test_step_without_gradients_has_total_norm_zero() -> None:
    case = ModuleCase(**{**PERCEPTRON, "build": f"{HERE}frozen", "max_norm": 1.0, "optimizer": f"{HERE}of_everything"})

    assert float(expect(case, 0).tensors["output.total_norm"].value) == 0


@pytest.mark.ranks
def test_step_without_a_loss_raises_misuse(pool: Pool) -> None:
    verdicts = judge_misused(ModuleCase(world_size=1, **{**TOKENS, "step": f"{HERE}reports_nothing"}), pool)

    assert "reports_nothing returns no tensor: return a tensor" in verdicts


@pytest.mark.ranks
def test_step_that_freezes_a_parameter_for_the_next_step_is_refused(pool: Pool) -> None:
    made = {**TOKENS, "step": f"{HERE}freezes"}

    assert "step 1 changes requires_grad of module.embedding.weight" in judge_misused(
        ModuleCase(world_size=2, **made), pool
    )


def judge_misused(case: ModuleCase, pool: Pool) -> str:
    with pytest.raises(Misuse) as refused:
        judge("module", case, pool)
    return str(refused.value)


def test_property_of_training_draws_cases_of_two_steps_by_default() -> None:
    prop = module_property(
        TOKENS["build"],
        TOKENS["parallelize"],
        inputs={"ids": ids(7, ("batch", "seq")), "targets": targets(7, ("batch", "seq"))},
        sizes={"batch": (4,), "seq": (2,)},
        optimizer=TOKENS["optimizer"],
        step=TOKENS["step"],
        batch=PARTS_OF_WHOLE,
    )
    find(prop.cases(Space(world_sizes=(2,), dtypes=("float32",))), lambda case: case.training.steps == 2)

    assert "trains_like_unsharded" in [claim.name for claim in prop.claims]


def test_some_drawn_targets_have_a_row_in_which_all_are_ignored() -> None:
    source = torch.Generator().manual_seed(0)
    drawn = [make_whole_numbers("targets(7, -100)", (4, 3), 0, source) for _ in range(50)]

    assert all(bool((each != -100).any()) for each in drawn)
    assert any(bool((each == -100).all(dim=1).any()) for each in drawn)


@pytest.mark.parametrize(("step", "name", "later"), [(1, "grad.x", "grad.x"), (3, "grad.x", "step3.grad.x")])
def test_names_of_step_tensors_are_parsed(step: int, name: str, later: str) -> None:
    assert at_step(step, name) == later and in_one_step(later) == name
    assert updated(2, "0.weight") == "step2.param.0.weight"
