"""Subjects that compute the cross entropy of sharded logits, with and without torch's loss_parallel.

Source: torch/distributed/tensor/parallel/loss.py, loss_parallel (2.13.0).  A correct subject
computes what torch.nn.functional.cross_entropy computes from the whole logits, forward and backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn.functional import cross_entropy

from equivtest.base.refusal import is_older
from equivtest.cases.subject import Answers, Given, as_dtensor, run_backward, under_contract
from equivtest.errors import Unsupported
from equivtest.families.cross_entropy.case import CrossEntropyCase, RefusedCrossEntropyCase
from equivtest.families.cross_entropy.gathered.case import GatheredCrossEntropyCase

Loss = Callable[[CrossEntropyCase, torch.Tensor, Given], torch.Tensor]
"""Function (case, logits, given) -> loss. `given` has the target and the weight, plain or as DTensors."""


def parallel_cross_entropy(case: CrossEntropyCase, mesh: DeviceMesh, given: Given) -> Answers:
    """Runs F.cross_entropy within loss_parallel.

    Raises:
        Unsupported: the mesh has two axes, and the installed torch is older than 2.13.
    """
    if is_older(torch.__version__) and case.row_ranks > 1:
        raise Unsupported(f"torch {torch.__version__} has loss_parallel for a mesh of one axis only")
    with within_loss_parallel():
        return run_loss(case, mesh, given, parallel_by_torch)


def parallel_by_torch(case: CrossEntropyCase, logits: torch.Tensor, given: Given) -> torch.Tensor:
    """Returns the loss. A sum over positions that ranks divide is partial, and is added up here."""
    output = cross_entropy_by_torch(case, logits, given)
    if case.row_ranks == 1 or case.reduction != "sum" or not isinstance(output, DTensor):
        return output
    return output.redistribute(placements=[Replicate()] * output.device_mesh.ndim)


def dtensor_cross_entropy(case: GatheredCrossEntropyCase, mesh: DeviceMesh, given: Given) -> Answers:
    """Runs F.cross_entropy on DTensors. torch gathers the logits.

    Source: softmax_strategy, nll_loss_forward_strategy and nll_loss_backward_strategy in
    torch/distributed/tensor/_ops/_math_ops.py (2.13.0).
    """
    return run_loss(case, mesh, given, gathered_by_torch)


def gathered_by_torch(case: CrossEntropyCase, logits: torch.Tensor, given: Given) -> torch.Tensor:
    output = cross_entropy_by_torch(case, logits, given)
    return output.redistribute(placements=[Replicate()]) if isinstance(output, DTensor) else output


def cross_entropy_by_torch(case: CrossEntropyCase, logits: torch.Tensor, given: Given) -> torch.Tensor:
    smoothing = case.label_smoothing if isinstance(case, GatheredCrossEntropyCase) else 0.0
    if isinstance(case, RefusedCrossEntropyCase) and case.misfit == "label_smoothing":
        smoothing = 0.125
    return cross_entropy(
        logits,
        given["target"],
        given.get("weight"),
        ignore_index=case.ignore_index,
        reduction=case.reduction,
        label_smoothing=smoothing,
    )


def run_loss(case: CrossEntropyCase, mesh: DeviceMesh, given: Given, loss: Loss) -> Answers:
    x = given["x"].detach().requires_grad_("x" in case.requires_grad)  # shares the harness's memory
    wrapped = {"target": case.target_is_dtensor, "weight": case.weight_is_dtensor}
    others = {
        name: as_dtensor(given[name], case, name, mesh) if is_dtensor else given[name]
        for name, is_dtensor in wrapped.items()
        if name in given
    }
    output = loss(case, as_dtensor(x, case, "x", mesh), others)
    run_backward(output, case, mesh, given["cotangent"])
    found: dict[str, torch.Tensor | None] = {"output": output}
    return under_contract(case, found | {f"grad.{name}": x.grad for name in case.requires_grad})


@contextmanager
def within_loss_parallel() -> Iterator[None]:
    """Runs a block within loss_parallel.

    If the block raises, torch leaves loss_parallel's operators in place. This function then enters and leaves
    loss_parallel once more, which removes the operators.
    """
    try:
        with loss_parallel():
            yield
    except BaseException:
        with loss_parallel():
            pass
        raise
