"""Captured blocks with several forwards and backwards; their gradients add up."""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import equivtest
from equivtest.captured.judge.report import compare_runs, describe
from equivtest.errors import Misuse
from equivtest.oracle.declared import arithmetic_of
from equivtest.oracle.running import RunningError
from equivtest.programs.case import ModuleCase
from equivtest.programs.oracle.steps import added_up
from equivtest.ranks.pool import Pool
from tests.program.test_capture import first_wrong, judged
from tests.programs.captured import model

HERE = "tests.programs.captured:"
ROWS = (3, 2, 4)


def inputs(rows: Sequence[int] = ROWS) -> list[torch.Tensor]:
    return [torch.randn(num, 4, generator=torch.Generator().manual_seed(num)) for num in rows]


class Around(nn.Sequential):
    """Runs its first part before and after the second."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self[0](self[1](self[0](x)))
        return found


def loss_of(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = module(x).square().sum() / sum(ROWS)
    return loss


def one_by_one(module: nn.Module, dtype: torch.dtype = torch.float32) -> None:
    for x in inputs():
        loss_of(module, x.to(dtype)).backward()


def all_forwards_first(module: nn.Module) -> None:
    for loss in [loss_of(module, x) for x in inputs()]:
        loss.backward()


def captured(folder: Path, body: Callable[[nn.Module], object], module: nn.Module | None = None) -> Path:
    module = model() if module is None else module
    with equivtest.capture(module, folder):
        body(module)
    return folder


def forgetting(module: nn.Module) -> None:
    """The gradients of the first micro-batch are lost."""
    for x in inputs():
        loss_of(module, x).backward()
        if len(x) == ROWS[0]:
            module.zero_grad()


def twice(module: nn.Module) -> None:
    """Doubles the gradients of the last micro-batch."""
    for x in inputs():
        before = {name: each.grad.clone() for name, each in module.named_parameters() if each.grad is not None}
        loss_of(module, x).backward()
        if len(x) == ROWS[-1]:
            for name, each in module.named_parameters():
                assert each.grad is not None
                each.grad += each.grad - before[name]


def more_in_the_second() -> nn.Module:
    """A part gives an eighth more in one micro-batch."""
    module = model()
    hook: Any = lambda _, __, given: given * (1.125 if len(given) == ROWS[1] else 1.0)  # noqa: E731
    module.get_submodule("1.down").register_forward_hook(hook)
    return module


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_right_micro_batches_of_unequal_size_pass_in_any_order_of_backwards(tmp_path: Path, dtype: torch.dtype) -> None:
    found = judged(captured(tmp_path / "run", lambda module: one_by_one(module, dtype), model().to(dtype)))

    assert {verdict.kind for verdict in found.verdicts} == {"holds"}
    assert describe(found).endswith(", 3 micro-batches; 48 of 48 boundaries judged")
    if dtype == torch.float32:
        later = judged(captured(tmp_path / "later", all_forwards_first))
        assert compare_runs(found, later).startswith("both runs hold: ")


@pytest.mark.parametrize("body", [forgetting, twice])
def test_gradient_that_omits_or_repeats_a_micro_batch_is_rejected(
    tmp_path: Path, body: Callable[[nn.Module], object]
) -> None:
    assert first_wrong(judged(captured(tmp_path / "run", body))) == "grad.0.up.weight"


def test_message_names_the_wrong_submodule_and_the_number_of_its_micro_batch(tmp_path: Path) -> None:
    assert first_wrong(judged(captured(tmp_path / "run", one_by_one, more_in_the_second()))) == "micro2.boundary.1.down"


def test_buffers_are_judged_after_each_forward_that_changes_them(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    folder = captured(tmp_path / "run", one_by_one, module)
    found = judged(folder, HERE + "normed")

    assert (
        not found.failed
        and {"buffer.1.running_mean", "micro3.buffer.1.running_mean"} <= found.evidence.expected.tensors.keys()
    )


def test_submodule_captured_alone_and_called_twice_is_judged(tmp_path: Path) -> None:
    module = Around(*model().children())
    with equivtest.capture(module, tmp_path / "run", alone=("0",)):
        loss_of(module, inputs()[0]).backward()

    assert judged(tmp_path / "run" / "0").coverage() == "12 of 12 boundaries judged"


def test_recomputation_by_checkpointing_does_not_count_as_a_micro_batch(tmp_path: Path) -> None:
    module = model()
    with equivtest.capture(module, tmp_path / "run"):
        x = inputs()[0].requires_grad_()
        given = torch.utils.checkpoint.checkpoint(module, x, use_reentrant=False)
        given.square().sum().backward()
    found = judged(tmp_path / "run")

    assert not found.failed and found.run.manifest.micro_batches == 1


def test_accumulated_gradient_rounded_after_each_addition_is_within_its_bound() -> None:
    small = 2.0**-9 * 0.99
    shares = torch.tensor([[1.0, *[small] * 63], [-0.5, *[-small / 2] * 63]]).bfloat16()
    exact = shares.double().sum(0)
    on_each_rank_first = functools.reduce(torch.add, shares.unbind(1)).sum()
    counted = RunningError(arithmetic_of("bfloat16"), len(shares))
    value = exact.bfloat16()
    stack = counted.roundings.summed(value, (value.double() - exact).abs(), shares.double().abs().sum(0), 0).wrapped()
    with counted:
        total = stack.sum(0)
    ratios = [
        (on_each_rank_first.double() - bound.value).abs() / bound.allowed
        for bound in (counted.bounded(total), counted.bounded(added_up(counted, total, 64)))
    ]

    assert ratios[0] > 1 > ratios[1] > 0.1


def ends_without_backward(module: nn.Module) -> None:
    one_by_one(module)
    with torch.no_grad():
        module(inputs()[0])


def partly_under_autocast(module: nn.Module) -> None:
    one_by_one(module)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        one_by_one(module)


def handed_otherwise(module: nn.Module) -> None:
    one_by_one(module)
    loss: torch.Tensor = module(input=inputs()[0]).sum()
    loss.backward()


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (
            ends_without_backward,
            r"no gradient reached the outputs of call 4 of 4 .*: call backward for each forward there, and run",
        ),
        (partly_under_autocast, r"was called under autocast none and cpu:bfloat16 within the block"),
        (handed_otherwise, r"took the inputs input in call 4, but input in call 1: .* in the same way"),
    ],
)
def test_capture_refuses_calls_that_cannot_be_micro_batches(
    tmp_path: Path, body: Callable[[nn.Module], object], words: str
) -> None:
    with pytest.raises(Misuse, match=words):
        captured(tmp_path / "run", body)


def test_manifest_with_too_many_micro_batches_is_refused(tmp_path: Path) -> None:
    path = captured(tmp_path / "run", one_by_one) / "rank-00000.json"
    told = json.loads(path.read_bytes())
    for number, words in (
        (4, "did not write tensor given.input"),
        (10**9, "names 1000000000 micro-batches"),
        (0, "names 0 micro"),
    ):
        path.write_text(json.dumps({**copy.deepcopy(told), "micro_batches": number}))
        with pytest.raises(Misuse, match=words):
            judged(tmp_path / "run")


@pytest.mark.ranks
@pytest.mark.parametrize("subject", ["accumulated_at_once", "accumulated_each_time", "accumulated_on_one_rank"])
def test_gradients_may_be_reduced_after_each_micro_batch_or_after_the_last(
    pool: Pool, tmp_path: Path, subject: str
) -> None:
    case = ModuleCase(world_size=2, build=HERE + "blocks", parallelize=str(tmp_path / "run"), x_shape=(1, 4))
    pool.run(HERE + subject, case)
    found = judged(tmp_path / "run")

    assert (first_wrong(found) if found.failed else "") == ("grad.0.up.weight" if "one_rank" in subject else "")
    assert found.run.manifest.micro_batches == len(ROWS)
