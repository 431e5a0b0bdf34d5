"""Subject that calls torch's differentiable collectives, each forward and backward.

Each call names the root by its number in the world, as torch.distributed requires.

Source: torch.distributed.nn.functional and torch.distributed._functional_collectives, docstrings (2.13.0).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed as dist
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.nn import functional as untyped
from torch.nn.functional import pad

from equivtest.base.refusal import is_older
from equivtest.cases.subject import Answers, Given, under_contract
from equivtest.errors import Unsupported
from equivtest.families.differentiable.case import Call, DifferentiableCase

nn: Any = untyped


@dataclass(frozen=True)
class Room:
    """Group of one call, this rank's number in the group, and the root's number in the group."""

    case: DifferentiableCase
    group: Any
    rank: int
    root: int = 0

    @property
    def source(self) -> int:
        """The root's number in the world."""
        return dist.get_global_rank(self.group, self.root)

    @property
    def splits(self) -> tuple[list[int], list[int]]:
        """Returns (received, sent) for an uneven exchange: the numbers of elements from and for each rank."""
        case, ranks = self.case, range(self.case.world_size)
        return [case.split(source, self.rank) for source in ranks], [case.split(self.rank, each) for each in ranks]


Begin = Callable[[Room, Call, torch.Tensor], torch.Tensor]
"""Function (room, call, parts) -> output.

The parts are (w, n); the output has n elements, w * n, or as many as `splits` says.
"""


def differentiable_collectives(case: DifferentiableCase, mesh: DeviceMesh, given: Given) -> Answers:
    return run_differentiable(case, mesh, given, begin)


def run_differentiable(case: DifferentiableCase, mesh: DeviceMesh, given: Given, begin: Begin) -> Answers:
    """Returns the outputs and the gradients of the operands, by name. `begin` calls one collective.

    Raises:
        Unsupported: the case has functional collectives, which have a backward since torch 2.13, and the installed
            torch is older.
    """
    group = mesh.get_group()
    answers: dict[str, torch.Tensor | None] = {}
    for call in case.calls:
        if is_older(torch.__version__) and not call.function.startswith("nn_"):
            raise Unsupported(f"{call.function} has no backward in torch {torch.__version__}")
        outputs, gradients = [], []
        for root in range(case.world_size if call.is_rooted else 1):
            room = Room(case, group, dist.get_rank(group), root)
            x = given["x"][0, root].detach().clone().requires_grad_()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)  # most of nn.functional is deprecated
                output = _in_parts(room, call, begin(room, call, x))
            output.backward(given["cotangent"][0, root])  # type: ignore[no-untyped-call]
            assert x.grad is not None
            outputs.append(output.detach() if _is_documented(room, call) else torch.zeros_like(output))
            gradients.append(x.grad)
        answers |= {call.name: torch.stack(outputs)[None], f"grad.{call.name}": torch.stack(gradients)[None]}
    return under_contract(case, answers)


def _is_documented(room: Room, call: Call) -> bool:
    """True if torch documents this rank's output: of a sum or gather at a root, it documents only the root's."""
    return not call.is_rooted or call.result in ("copied", "scattered") or room.rank == room.root


def _in_parts(room: Room, call: Call, output: torch.Tensor) -> torch.Tensor:
    """Returns one row per rank, padded with zeros. The product with 1 waits for a functional collective."""
    ranks, numel = room.case.world_size, room.case.numel
    sizes = room.splits[0] if call.result == "uneven" else [numel] * max(1, output.numel() // max(1, numel))
    rows = [pad(row, (0, numel - len(row))) for row in torch.split(output.reshape(-1) * 1, sizes)]
    return pad(torch.stack(rows), (0, 0, 0, ranks - len(rows)))


def begin(room: Room, call: Call, x: torch.Tensor) -> torch.Tensor:
    return FUNCTIONS[call.function](room, call, x)


def op_of(call: Call) -> dist.ReduceOp.RedOpType:
    return dist.ReduceOp.AVG if call.op == "avg" else dist.ReduceOp.SUM


def cut(room: Room, x: torch.Tensor) -> torch.Tensor:
    return torch.cat([part[:numel] for part, numel in zip(x, room.splits[1], strict=True)])


def halves(x: torch.Tensor) -> list[torch.Tensor]:
    """Splits each part into two halves. Returns (all first halves, all second halves), for a coalesced call."""
    return [half.reshape(-1) for half in x.tensor_split(2, dim=-1)]


def gather_halves(room: Room, x: torch.Tensor) -> torch.Tensor:
    gathered = functional.all_gather_single_coalesced(halves(x[0]), room.group)
    return torch.cat([half.reshape(len(x), half.numel() // len(x)) for half in gathered], dim=1)


def scatter_halves(room: Room, x: torch.Tensor) -> torch.Tensor:
    """Scatters the first half of each part along dim 1, and the second half along dim 0."""
    first, second = x.tensor_split(2, dim=-1)
    scattered = functional.reduce_scatter_single_coalesced([first.t(), second.reshape(-1)], "sum", [1, 0], room.group)
    return torch.cat([half.reshape(-1) for half in scattered])


FUNCTIONS: dict[str, Begin] = {
    "nn_broadcast": lambda room, call, x: nn.broadcast(x[0], room.source, room.group),
    "nn_gather": lambda room, call, x: torch.cat(nn.gather(x[0], room.source, room.group)),
    "nn_scatter": lambda room, call, x: nn.scatter(list(x), room.source, room.group),
    "nn_all_gather": lambda room, call, x: torch.cat(nn.all_gather(x[0], room.group)),
    "nn_all_to_all": lambda room, call, x: torch.cat(
        nn.all_to_all([torch.empty_like(part) for part in x.detach()], list(x), room.group)
    ),
    "nn_all_to_all_single": lambda room, call, x: nn.all_to_all_single(
        x.new_empty(x.numel()), x.reshape(-1), group=room.group
    ),
    "nn_all_to_all_single_uneven": lambda room, call, x: nn.all_to_all_single(
        x.new_empty(sum(room.splits[0])), cut(room, x), *room.splits, room.group
    ),
    "nn_reduce": lambda room, call, x: nn.reduce(x[0], room.source, op_of(call), room.group),
    "nn_all_reduce": lambda room, call, x: nn.all_reduce(x[0], op_of(call), room.group),
    "nn_reduce_scatter": lambda room, call, x: nn.reduce_scatter(
        x.new_empty(x.shape[1]), list(x), op_of(call), room.group
    ),
    "all_reduce": lambda room, call, x: functional.all_reduce(x[0], "sum", room.group),
    "all_gather_single": lambda room, call, x: functional.all_gather_single(x[0], 0, room.group),
    "all_gather_tensor_autograd": lambda room, call, x: (
        functional.all_gather_tensor_autograd(x[0][:, None], 1, room.group).view(x.shape[1], len(x)).t()
    ),
    "all_gather_single_autograd": lambda room, call, x: (
        functional.all_gather_single_autograd(x[0][:, None], 1, room.group).view(x.shape[1], len(x)).t()
    ),
    "reduce_scatter_single": lambda room, call, x: functional.reduce_scatter_single(
        x.reshape(-1), "sum", 0, room.group
    ),
    "reduce_scatter_tensor_autograd": lambda room, call, x: functional.reduce_scatter_tensor_autograd(
        x.t(), "sum", 1, room.group
    ),
    "reduce_scatter_single_autograd": lambda room, call, x: functional.reduce_scatter_single_autograd(
        x.t(), "sum", 1, room.group
    ),
    "all_to_all_single": lambda room, call, x: functional.all_to_all_single(x.reshape(-1), None, None, room.group),
    "all_to_all_single_uneven": lambda room, call, x: functional.all_to_all_single(
        cut(room, x), *room.splits, room.group
    ),
    "all_to_all_single_autograd": lambda room, call, x: functional.all_to_all_single_autograd(
        cut(room, x), *room.splits, room.group
    ),
    "all_reduce_coalesced": lambda room, call, x: torch.cat(
        functional.all_reduce_coalesced(halves(x[0]), "sum", room.group)
    ),
    "all_gather_single_coalesced": lambda room, call, x: gather_halves(room, x),
    "reduce_scatter_single_coalesced": lambda room, call, x: scatter_halves(room, x),
}
"""Name of a case's function -> the function that calls it."""
