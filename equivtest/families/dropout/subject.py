"""Subject that runs nn.Dropout on a DTensor, or under torch's SequenceParallel.

Source: torch/distributed/tensor/parallel/style.py, class SequenceParallel, whose docstring names nn.Dropout;
torch/distributed/tensor/_random.py: "Users must ensure [...] that the value passed in is the desired seed for ranks
within device_mesh", the same on each. On a device without support for OffsetBasedRNGTracker, such as the CPU, torch
warns that random operators "may not have complete support" (2.13.0).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor._random import manual_seed
from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

from equivtest.cases.subject import Answers, Given, as_dtensor, require_form, run_backward, under_contract
from equivtest.families.dropout.case import DropoutCase
from equivtest.layout import Shard


def parallel_dropout(case: DropoutCase, mesh: DeviceMesh, given: Given) -> Answers:
    layer: nn.Module = nn.Dropout(case.p).train(case.training)
    if case.style == "sequence_parallel":
        assert isinstance(case.placement, Shard)
        plan = SequenceParallel(sequence_dim=case.placement.dim, use_local_output=case.use_local_output)
        layer = parallelize_module(layer, mesh, plan)
    x = given["x"].detach().requires_grad_("x" in case.requires_grad)  # shares the harness's memory
    with seeded(mesh, int(given["seeds"])):
        given_x = as_dtensor(x, case, "x", mesh) if case.x_is_dtensor else x
        output = checkpoint(layer, given_x, use_reentrant=case.reentrant) if case.recomputed else layer(given_x)
        require_form(output, is_plain=case.use_local_output)
        run_backward(output, case, mesh, given["cotangent"])
    return dropout_answers(case, x, output)


def dropout_answers(case: DropoutCase, x: torch.Tensor, output: torch.Tensor) -> Answers:
    return under_contract(case, {"output": output, **{f"grad.{name}": x.grad for name in case.requires_grad}})


@contextmanager
def seeded(mesh: DeviceMesh, seed: int) -> Iterator[None]:
    """Seeds torch's and DTensor's generators, and hides the warning that DTensor has no generator for the device.

    Seeding also creates DTensor's own generator, if DTensor has one for the device. Without this, the first random
    operator would create the generator, with rank 0's state, by a broadcast.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="DTensor (random operators|manual_seed)", category=UserWarning)
        manual_seed(seed, mesh)
        torch.manual_seed(seed)
        yield
