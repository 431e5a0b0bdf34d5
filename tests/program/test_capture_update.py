"""Updates that happened elsewhere: the optimizer's inputs and its results."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import equivtest
from equivtest.captured.format.folder import CapturedRun
from equivtest.captured.judge.report import Judged, compare_runs, describe
from equivtest.captured.judge.run import judge_run
from equivtest.errors import Misuse
from equivtest.programs.case import ModuleCase
from equivtest.programs.oracle.update import FOLLOWED
from equivtest.ranks.pool import Pool
from tests.programs.captured import model, step

HERE = "tests.programs.captured:"
Spoil = Callable[[nn.Module, torch.optim.Optimizer], object]


def nothing(module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    pass


def updated(
    folder: Path, name: str = "AdamW", spoil: Spoil = nothing, dtype: torch.dtype = torch.float32, **how: Any
) -> Judged:
    """Captures and judges the second of two updates; `spoil` acts before the block ends."""
    module = model()
    optimizer: torch.optim.Optimizer = getattr(torch.optim, name)(module.parameters(), lr=2.0**-5, **how)
    step(module)
    module.to(dtype)
    for each in module.parameters():
        each.grad = each.grad.to(dtype) if each.grad is not None else None
    optimizer.step()
    with equivtest.capture_update(module, optimizer, folder):
        spoil(module, optimizer)
        optimizer.step()
    return judge_run(CapturedRun(folder), HERE + "blocks")


@pytest.mark.parametrize("name", FOLLOWED)
def test_right_captured_update_passes_with_its_optimizer_state(tmp_path: Path, name: str) -> None:
    found = updated(tmp_path / "run", name)

    assert {verdict.kind for verdict in found.verdicts} == {"holds"}
    assert found.coverage().endswith(f"tensors judged after the update of {name}")


@pytest.mark.parametrize("how", [{"foreach": True}, {"fused": True}])
def test_right_captured_update_in_bfloat16_passes(tmp_path: Path, how: dict[str, bool]) -> None:
    found = updated(tmp_path / "run", dtype=torch.bfloat16, **how)

    assert {verdict.kind for verdict in found.verdicts} == {"holds"}


@pytest.mark.parametrize("is_changed", [False, True])
def test_parameter_outside_of_the_optimizers_groups_is_reported_and_must_not_change(
    tmp_path: Path, *, is_changed: bool
) -> None:
    module = model()
    left_out = module.get_parameter("1.down.bias")
    optimizer = torch.optim.SGD([each for each in module.parameters() if each is not left_out], lr=2.0**-5)
    step(module)
    with equivtest.capture_update(module, optimizer, tmp_path / "run"):
        optimizer.step()
        if is_changed:
            farther(module, optimizer)

    found = judge_run(CapturedRun(tmp_path / "run"), HERE + "blocks")

    assert bool(found.failed) == is_changed
    assert found.coverage().endswith("although they have a gradient: 1.down.bias")


def spoiled_after(change: Callable[[nn.Module, torch.optim.Optimizer], object]) -> Spoil:
    """Changes a tensor after the step ends and before it is recorded."""

    def spoil(module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.register_step_post_hook(lambda *_: change(module, optimizer))

    return spoil


def farther(module: nn.Module, _: torch.optim.Optimizer) -> None:
    with torch.no_grad():
        module.get_parameter("1.down.bias")[2] += 2.0**-6


def stale(module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.state[module.get_parameter("0.up.weight")]["exp_avg"].mul_(1.25)


@pytest.mark.parametrize(
    ("change", "first"), [(farther, "step1.param.1.down.bias"), (stale, "step1.state.0.up.weight:exp_avg")]
)
def test_message_names_the_tensor_that_an_update_made_wrong(tmp_path: Path, change: Spoil, first: str) -> None:
    found = updated(tmp_path / "wrong", spoil=spoiled_after(change))
    right = updated(tmp_path / "right")

    assert found.failed[0].judgement.mismatches[0].tensor == first
    assert describe(found).startswith("ValueMismatch: ")
    assert compare_runs(right, found) == f"wrong: {tmp_path / 'wrong'}; every claim holds on {tmp_path / 'right'}"


def test_captured_update_that_the_block_undoes_is_rejected(tmp_path: Path) -> None:
    module = model()
    optimizer = torch.optim.SGD(module.parameters(), lr=2.0**-5)
    step(module)
    bias = module.get_parameter("1.down.bias")
    before = bias.detach().clone()
    with equivtest.capture_update(module, optimizer, tmp_path / "run"):
        optimizer.step()
        bias.data.copy_(before)
    found = judge_run(CapturedRun(tmp_path / "run"), HERE + "blocks")

    assert found.failed[0].judgement.mismatches[0].tensor == "step1.param.1.down.bias"


@pytest.mark.ranks
@pytest.mark.parametrize(("subject", "is_wrong"), [("updated_on_ranks", False), ("wrongly_updated_on_ranks", True)])
def test_captured_update_of_sharded_parameters_is_judged(
    pool: Pool, tmp_path: Path, subject: str, *, is_wrong: bool
) -> None:
    case = ModuleCase(world_size=2, build=HERE + "blocks", parallelize=str(tmp_path / "run"), x_shape=(1, 4))
    pool.run(HERE + subject, case)
    found = judge_run(CapturedRun(tmp_path / "run"), HERE + "blocks")

    assert bool(found.failed) == is_wrong
    assert is_wrong or {verdict.kind for verdict in found.verdicts} == {"holds"}


@pytest.mark.parametrize("times", [0, 2])
def test_capture_update_refuses_a_block_with_no_or_several_updates(tmp_path: Path, times: int) -> None:
    module = model()
    optimizer = torch.optim.SGD(module.parameters())

    def run() -> None:
        with equivtest.capture_update(module, optimizer, tmp_path / "run"):
            for _ in range(times):
                optimizer.step()

    with pytest.raises(Misuse, match=f"optimizer.step was called {times} times"):
        run()
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"optimizer": "Optimizer"}, "is not one whose update equivtest can compute: use one of ASGD, Adadelta"),
        ({"optimizer": "__loader__"}, "is not one whose update equivtest can compute: use one of ASGD, Adadelta"),
        ({"groups": [{"parameters": ["0.up.weight"], "options": {"lr": -1.0}}]}, "does not take the options"),
        ({"groups": [{"parameters": ["0.up.weight"], "options": {"betas": 0.5}}]}, "does not take the options"),
        ({"groups": [{"parameters": ["0.up.weight"], "options": {"closure": 1.0}}]}, "has no option 'closure'"),
        (
            {"groups": [{"parameters": ["other"], "options": {}}]},
            "must name only parameters of the run, and each at most once",
        ),
    ],
)
def test_manifest_with_impossible_fields_of_an_update_is_refused(
    tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    updated(tmp_path / "run")
    path = tmp_path / "run" / "rank-00000.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))

    with pytest.raises(Misuse, match=words):
        judge_run(CapturedRun(tmp_path / "run"), HERE + "blocks")
