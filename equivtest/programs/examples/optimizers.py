"""A module that ten elementwise optimizers of torch.optim train, each with two separate parameters of two dtypes.

The module `whole_optimizers` has the other optimizers.

torch has up to three implementations of an optimizer: a loop over the parameters, calls for lists of parameters
(foreach), and one kernel (fused).  The unsharded module is trained by the loop.

Source: torch/optim (2.13.0), the options and the implementations of each class.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.nn.utils import clip_grad_value_
from torch.optim.swa_utils import get_swa_avg_fn, get_swa_multi_avg_fn

from equivtest.programs.examples.optimizer_options import COMMON, LATER_COMMON, ROUNDED, UNLIKE, new, options_of
from equivtest.programs.examples.whole_optimizers import trained_number, unsharded_number

WAYS = ("foreach", "fused")
CLIPPED, LARGEST = "Adadelta", 0.5
"""The optimizer before whose updates gradients are clipped by value, and the largest value."""
AVERAGED = "Adamax"
"""The optimizer after whose updates the parameter becomes the average of its values after all updates so far."""
MULTIPLIED, LIKE_NUMBER = "SGD", 2048
"""The optimizer whose late parameter the result of `whole_optimizers` multiplies, and a number like this result."""
AVERAGE = "ax"
"""Name of a state of ASGD, the average of its updated parameters."""
UPDATES = {"ASGD": 3, "RAdam": 6}
"""Optimizer -> number of its updates in one step, if not 2.

ASGD does not average before its fourth update. RAdam's sixth update is its first with `eps`.
"""


class ManyTrained(nn.Module):
    """A linear layer whose weight is made of two parts for each optimizer.

    Attributes:
        parts, late: Parameters by the optimizer's name. The parameters of `late` have no gradient in a step's
            first update.
        options: 'plain' or 'varied', which name options in `UNLIKE`.
        fused: Name of the one optimizer that runs as a fused kernel. The others then use foreach. If it is '', each
            optimizer loops over its parameters. DTensor has rules for the fused kernels of Adam and AdamW alone.
    """

    def __init__(self, options: str, fused: str) -> None:
        super().__init__()
        self.options, self.fused = options, fused
        self.parts = nn.ParameterDict({name: nn.Parameter(torch.zeros(3, 2)) for name in UNLIKE})
        self.late = nn.ParameterDict({name: nn.Parameter(torch.zeros(2, 2)) for name in UNLIKE})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, torch.cat([part[name] for part in (self.parts, self.late) for name in UNLIKE]))


def many_trained(*, options: str, fused: str) -> nn.Module:
    return ManyTrained(options, fused)


class Together(torch.optim.Optimizer):
    """Several optimizers in one. A step makes two or more updates by each, from the same gradients.

    Each optimizer trains a float64 copy of its late parameter, beside a parameter of the module. The first update
    leaves out the copy, which has no state yet in the second one. In the second step each optimizer gets another copy,
    in a group with the other options of the optimizer. The late parameter becomes the mean of its copies.

    In a step of a parallel module, optimizers resume after their first update: their states are loaded into new ones.

    Attributes:
        late: The copied parameter of each optimizer.
        averages: Average of each averaged parameter, over `num_averaged` updates.
    """

    def __init__(self, module: Any) -> None:
        self.optimizers = [_made(module, name) for name in UNLIKE]
        self.late = [module.late[name] for name in UNLIKE]
        self.others = "varied" if module.options == "plain" else "plain"
        self.averages: list[torch.Tensor] = []
        self.num_averaged = self.num_steps = 0
        groups = [group for each in self.optimizers for group in each.param_groups]
        super().__init__([*groups, {"params": self.late}], {})

    def step(self, closure: Any = None) -> Any:
        for index, late in enumerate(self.late):
            each = self.optimizers[index]
            name, (group, *_) = type(each).__name__, each.param_groups
            if self.num_steps == 1:
                ways = {way: group[way] for way in WAYS if way in group}
                options = options_of(name, self.others, LATER_COMMON)
                each.add_param_group({"params": late.detach().double(), **options, **ways})
            _, *copies = (parameter for group in each.param_groups for parameter in group["params"])
            for each_copy in copies:
                each_copy.grad = late.grad.double()
            if name == CLIPPED:
                clip_grad_value_([*group["params"], *copies[1:]], LARGEST, foreach=group["foreach"])
            withheld, copies[0].grad = copies[0].grad, None
            each.step()
            copies[0].grad = withheld
            if isinstance(late, DTensor) and (name not in ROUNDED or late.dtype == torch.float32):
                each = self.optimizers[index] = resumed(each)
            for _ in range(UPDATES.get(name, 2) - 1):
                each.step()
            if name == AVERAGED:
                self.average(group["params"], foreach=group["foreach"])
            averages = [each.state[copy][AVERAGE] for copy in copies if AVERAGE in each.state[copy]]
            with torch.no_grad():
                late.copy_(torch.stack([*copies, *averages]).mean(0))
                if name == MULTIPLIED and self.num_steps == 0:
                    resumes = isinstance(late, DTensor)
                    number = trained_number(lists=group["foreach"], resumes=True) if resumes else unsharded_number()
                    late.mul_(number / LIKE_NUMBER)
        self.num_steps += 1

    @torch.no_grad()
    def average(self, parameters: list[torch.Tensor], *, foreach: bool) -> None:
        """Averages the parameters as torch's `AveragedModel` does. FSDP2 modules cannot be copied into one."""
        if not self.num_averaged:
            self.averages = [each.detach().clone() for each in parameters]
        elif foreach:
            get_swa_multi_avg_fn()(self.averages, parameters, self.num_averaged)  # type: ignore[no-untyped-call]
        else:
            averaged = get_swa_avg_fn()  # type: ignore[no-untyped-call]
            pairs = zip(self.averages, parameters, strict=True)
            self.averages = [averaged(average, each, self.num_averaged) for average, each in pairs]
        self.num_averaged += 1
        for parameter, average in zip(parameters, self.averages, strict=True):
            parameter.copy_(average)


def by_all(module: Any) -> torch.optim.Optimizer:
    """Makes every optimizer, each for its two parameters."""
    return Together(module)


def _made(module: Any, name: str) -> torch.optim.Optimizer:
    """Makes an optimizer whose options are given for its group. Its defaults are torch's."""
    way = {"fused": True} if name == module.fused else {"foreach": bool(module.fused)}
    parameters = [module.parts[name], module.late[name].detach().double()]
    return new(getattr(torch.optim, name), [{"params": parameters, **options_of(name, module.options, COMMON), **way}])


def resumed(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Makes an optimizer with torch's options, and loads the options and the state of another optimizer."""
    made = new(type(optimizer), [{"params": group["params"]} for group in optimizer.param_groups])
    made.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    return made
