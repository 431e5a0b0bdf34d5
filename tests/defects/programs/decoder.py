"""Decoders that are wrong in one way each, in one part of one layer, their heads and hidden features divided."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from equivtest.cases.subject import Answers, Given
from equivtest.programs.case import ModuleCase
from equivtest.programs.examples.decoder_plan import heads_and_hidden_divided
from equivtest.programs.run.module import Parallelize, run_module
from tests.defects.defect import Replacing, run_with

wrong = Replacing("module")

Spoil = Callable[[torch.Tensor, DeviceMesh], torch.Tensor]

_DECODER = ModuleCase(
    world_size=2,
    build="equivtest.programs.examples.decoder:decoder",
    parallelize="equivtest.programs.examples.decoder_plan:heads_and_hidden_divided",
    x_shape=(1, 2, 24),
    values=(("real", 0),),
    by_parts=True,
)
_WHY = "one rank divides by one, and adds up nothing; the sizes of the module are its own"


def spoiled(part: str, spoil: Spoil) -> Parallelize:
    """Divides a decoder's heads and hidden features, and spoils the output of one part."""

    def parallelize(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        parallel = heads_and_hidden_divided(module, mesh)
        hook: Any = lambda _, __, given: spoil(given, mesh)  # noqa: E731
        parallel.get_submodule(part).register_forward_hook(hook)
        return parallel

    return parallelize


def _run_spoiled(case: ModuleCase, mesh: DeviceMesh, given: Given, part: str, spoil: Spoil) -> Answers:
    return run_module(case, mesh, given, spoiled(part, spoil))


def _average(output: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """A sum over the ranks is divided by their number."""
    return output / mesh.size()


average_of_shares = wrong("wrong divisor or wrong group", _DECODER, _WHY)(
    run_with(_run_spoiled, "layers.1.mlp.down", _average)
)


def _added_up_again(output: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """Gradients are added up over the ranks, although each rank has the whole gradient."""
    output.register_hook(lambda gradient: gradient * mesh.size())  # type: ignore[no-untyped-call]
    return output


gradient_summed_twice = wrong("wrong divisor or wrong group", _DECODER, _WHY, claim="gradients_equal_unsharded")(
    run_with(_run_spoiled, "layers.0.attention.value", _added_up_again)
)
