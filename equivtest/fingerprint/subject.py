"""Computes on a rank the values from which a fingerprint is measured, without judging them.

Source: torch.distributed.all_reduce, torch.nn.functional.embedding (2.13.0).
"""

from __future__ import annotations

import torch
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional

from equivtest.cases.subject import Given
from equivtest.fingerprint.case import FUNCTIONS, NUM_ROWS, WIDTHS, FingerprintCase
from equivtest.tensors import Placed


def fingerprint(case: FingerprintCase, mesh: DeviceMesh, given: Given) -> dict[str, Placed]:
    """Returns this rank's results by name: sums over ranks, a matrix product, functions, an embedding's gradient."""
    points, tiny = given["points"], given["tiny"][0]
    found = {
        "sums": torch.stack([_added(given["terms"][0], mesh) for _ in range(case.num_calls)]),
        "tiny_sum": _added(tiny, mesh),
        "tiny_product": tiny * torch.ones_like(tiny),
        "product": given["left"] @ given["right"],
        "elements": torch.stack((points + points.roll(1), points * points.roll(1))),
    }
    found |= {name: getattr(torch, name)(points) for name in FUNCTIONS}
    found |= {f"table.{width}": _table(given["ids"], given[f"rows.{width}"]) for width in WIDTHS}
    return {name: Placed(tensor, case.tensors[name].layout) for name, tensor in found.items()}


def _added(operand: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    total = operand.clone()
    dist.all_reduce(total, group=mesh.get_group())
    return total


def _table(ids: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Returns the gradient of an embedding's table.  Its row i is the sum of all `rows[k]` with `ids[k] == i`."""
    table = torch.zeros(NUM_ROWS, rows.shape[1], dtype=rows.dtype, device=rows.device, requires_grad=True)
    torch.autograd.backward(functional.embedding(ids, table), rows)
    assert table.grad is not None
    return table.grad
