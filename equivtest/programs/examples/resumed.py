"""A step of training that resumes from the state of an earlier step, as after a restart of the job.

Copies of the parameters are assigned, and the optimizer is made anew, with its groups of parameters in another order.
Its state is then loaded by the names of the parameters.

Source: torch.nn.Module.load_state_dict with `assign`, and get_optimizer_state_dict and set_optimizer_state_dict in
torch/distributed/checkpoint/state_dict.py (2.13.0).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.tensor import DTensor

from equivtest.programs.examples.token_mean import TokenMean

NORM: dict[str, Any] = {"lr": 0.0625, "momentum": 0.25}
OTHERS: dict[str, Any] = {"lr": 0.25, "momentum": 0.5}


class Resumable(torch.optim.Optimizer):
    """SGD with two groups of parameters, whose module and state can be loaded again.

    Attributes:
        inner: The optimizer that updates.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.inner = self.made(norm_first=False)
        super().__init__(self.inner.param_groups, {})

    def made(self, *, norm_first: bool) -> torch.optim.SGD:
        named = dict(self.module.named_parameters())
        groups = [
            {"params": [each for name, each in named.items() if "norm" not in name]},
            {"params": [each for name, each in named.items() if "norm" in name], **NORM},
        ]
        return torch.optim.SGD(groups[::-1] if norm_first else groups, **OTHERS)

    def step(self, closure: Any = None) -> Any:
        self.inner.step()

    def zero_grad(self, set_to_none: bool = True) -> None:  # noqa: FBT001, FBT002  # torch's signature
        self.inner.zero_grad(set_to_none)

    def resume(self) -> None:
        """Assigns copies of the parameters, spoils the earlier parameters, and loads the state into a new optimizer."""
        state = get_optimizer_state_dict(self.module, self.inner)
        earlier = list(self.module.parameters())
        copies = {name: tensor.clone() for name, tensor in self.module.state_dict().items()}
        self.module.load_state_dict(copies, assign=True)
        for parameter in earlier:
            assert isinstance(parameter, DTensor)
            parameter.to_local().detach().fill_(torch.nan)
        self.inner = self.made(norm_first=True)
        set_optimizer_state_dict(self.module, self.inner, state)


class Resumed(TokenMean):
    """The step of `TokenMean`, before which the module and the optimizer are loaded again.

    The first step does so too. torch makes the state of a new optimizer by an update with zero gradients and rates. No
    group has weight decay, because then this update changes the momentum.
    """

    optimizer: Resumable

    def begin(self) -> None:
        self.optimizer.resume()
        super().begin()


resumed = Resumed.step
