"""A user's file that uses each public name: mypy checks it strictly, as `make lint` runs it."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import equivtest as eq


def block(*, bias: bool = True) -> nn.Module:
    return nn.Linear(3, 2, bias=bias)


def replicated(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    if mesh.size() > 4:
        raise eq.NotSupported("more than four ranks")
    return module


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.25)


def step(
    module: nn.Module, mesh: DeviceMesh, micro_batches: list[dict[str, torch.Tensor]], optimizer: torch.optim.Optimizer
) -> dict[str, torch.Tensor]:
    return {}


NAMED: dict[str, eq.Input] = {
    "x": eq.real(("batch", 3)),
    "ids": eq.ids(11, ("batch", "seq")),
    "mask": eq.mask(("batch", "seq")),
    "targets": eq.targets(11, ("batch", "seq")),
    "positions": eq.positions(("seq",)),
}


def properties() -> list[eq.Property]:
    return [
        eq.program(block, replicated, [(1, 3), (4, 3)]),
        eq.program(
            block,
            replicated,
            NAMED,
            sizes={"seq": (2, 3)},
            positional=("x",),
            batch="mean of parts",
            options={"bias": (True, False)},
            training=eq.Training(optimizer=sgd, step=step, steps=2, micro_batches=2, max_norm=1.0, norm_type=2.0),
            world=eq.World(axes=("dp", "tp"), world_sizes=(1, 2), limit_s=30.0, needs_world=True),
            judge=eq.Judge(outputs=("loss",), loss="loss", by_parts=False, zero_or_none=("experts.*",)),
        ),
        eq.module_property("mypackage.models:block", "mypackage.models:replicated", [(1, 3)]),
    ]


def checked(space: eq.Space) -> str:
    try:
        result: eq.Result = eq.check(
            block, replicated, [(1, 3)], world_sizes=space.world_sizes, dtypes=space.dtypes, raises=True,
            backend=eq.Backend("gloo"),
        )  # fmt: skip
        again = eq.program(block, replicated, [(1, 3)]).check(world_sizes=(1, 2))
    except eq.CheckFailed as error:
        return error.result.failures[0].message
    except (eq.Misuse, eq.BrokenSetup, eq.Inconclusive, eq.Unsupported) as error:
        return str(error)
    except eq.EquivtestError:
        raise
    return f"{eq.__version__}: {result.ok and again.ok}, {dict(result.claims)}"


def placed(local: torch.Tensor) -> eq.Placed:
    layout = eq.Layout((eq.Shard(0), eq.Replicate(), eq.Partial("sum")))
    return eq.Placed(local, layout)


def flat() -> type[eq.Flat]:
    return eq.Flat


def captured(module: nn.Module) -> None:
    with eq.capture(module, "folder"):
        pass


UPDATE = eq.capture_update
ARITHMETIC: type[eq.Arithmetic] = eq.Arithmetic
