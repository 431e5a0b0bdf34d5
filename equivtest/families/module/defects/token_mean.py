"""Steps of training that are wrong in one way each, their batch divided among ranks and micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh

from equivtest.families.module.case import PARTS_OF_WHOLE, ModuleCase
from equivtest.families.module.subject import named_in, run_module
from equivtest.families.module.subject.token_mean import MAX_NORM, MicroBatch, clip, reduces_gradients, tokens_in
from equivtest.kit.defect import defect, run_with
from equivtest.kit.subject import Answers, Given

_STEP = "equivtest.families.module.subject.token_mean:"
_ONE_RANK = ModuleCase(
    world_size=1,
    build=f"{_STEP}next_token",
    parallelize="equivtest.families.module.subject:fully_sharded",
    inputs=(("ids", "ids(7)", ("batch", "seq")), ("targets", "targets(7, -100)", ("batch", "seq"))),
    sizes=(("batch", 2), ("seq", 2)),
    batch=PARTS_OF_WHOLE,
    optimizer=f"{_STEP}adamw",
    step=f"{_STEP}token_mean",
    steps=2,
    micro_batches=2,
    max_norm=MAX_NORM,
    values=(("real", 0),),
)
_TWO_RANKS = replace(_ONE_RANK, world_size=2)


def _step(
    module: Any,
    mesh: DeviceMesh,
    micro_batches: Sequence[MicroBatch],
    optimizer: torch.optim.Optimizer,
    *,
    keeps_gradients: bool = False,
    means: bool = False,
    reduces_first: bool = False,
    clips: Callable[[Any], torch.Tensor] = clip,
    reports_own: bool = False,
) -> dict[str, torch.Tensor]:
    """The right step, but for what is asked for."""
    if not keeps_gradients:
        optimizer.zero_grad()
    own = torch.stack([tokens_in(each) for each in micro_batches])
    num_tokens = own.sum()
    distributed.all_reduce(num_tokens, group=mesh.get_group())
    losses = []
    for number, each in enumerate(micro_batches):
        reduces_gradients(module, number == (0 if reduces_first else len(micro_batches) - 1))
        loss = module(**each, reduction="sum")["loss"]
        scaled = loss / own[number].clamp(min=1) / len(own) if means else loss * mesh.size() / num_tokens
        scaled.backward()
        losses.append(loss.detach())
    total = torch.stack(losses).sum()
    if not reports_own:
        distributed.all_reduce(total, group=mesh.get_group())
    norm = clips(module)
    optimizer.step()
    return {"loss": total / (own.sum().clamp(min=1) if reports_own else num_tokens), "total_norm": norm}


def _means(*given: Any) -> dict[str, torch.Tensor]:
    """Each micro-batch goes backward from the mean over its own tokens; these means are averaged."""
    return _step(*given, means=True)


def _first(*given: Any) -> dict[str, torch.Tensor]:
    """Gradients are reduced after the first micro-batch, and no more."""
    return _step(*given, reduces_first=True)


def _kept(*given: Any) -> dict[str, torch.Tensor]:
    """What the step before left in the gradients is added to."""
    return _step(*given, keeps_gradients=True)


def _own(*given: Any) -> dict[str, torch.Tensor]:
    """The loss that is reported is that of the rank's own tokens."""
    return _step(*given, reports_own=True)


def _own_norm(*given: Any) -> dict[str, torch.Tensor]:
    """Each rank clips its shards of the gradients by their norm."""
    return _step(*given, clips=_clip_own)


def _clip_own(module: Any) -> torch.Tensor:
    gradients = [each.grad.to_local() for each in module.parameters()]
    norm = torch.nn.utils.get_total_norm(gradients)
    for gradient in gradients:
        gradient.mul_((MAX_NORM / (norm + 1e-6)).clamp(max=1.0))
    return norm


def _run(case: ModuleCase, mesh: DeviceMesh, given: Given, step: Callable[..., object]) -> Answers:
    return run_module(replace(case, step=f"{step.__module__}:{step.__name__}"), mesh, given, named_in(case))


_RECORD: Any = {"replaces": "module", "claim": "gradients_equal_unsharded"}

mean_of_token_means = defect(
    **_RECORD,
    family="mean of means",
    smallest=replace(_ONE_RANK, values=(("real", 2),)),
    why="two micro-batches need two rows; the sizes of the module are its own",
)(run_with(_run, _means))

last_micro_batch_not_reduced = defect(
    **_RECORD,
    family="a reduction missing",
    smallest=_ONE_RANK,
    why="two micro-batches need two rows; the sizes of the module are its own",
)(run_with(_run, _first))

gradients_kept = defect(
    replaces="module",
    claim="trains_like_unsharded",
    family="state across steps",
    smallest=_ONE_RANK,
    why="the first step has nothing to keep; the property's batches have two rows at least",
)(run_with(_run, _kept))

loss_of_own_tokens = defect(
    replaces="module",
    claim="equals_unsharded",
    family="a reduction missing",
    smallest=_TWO_RANKS,
    why="one rank has all tokens, and each of two must have a row",
)(run_with(_run, _own))

norm_of_own_shards = defect(
    **_RECORD,
    family="wrong divisor or wrong group",
    smallest=_TWO_RANKS,
    why="one rank has whole gradients, and each of two must have a row",
)(run_with(_run, _own_norm))
