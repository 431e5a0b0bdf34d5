"""A step of training with micro-batches that DistributedDataParallel does not synchronize.

Source: DistributedDataParallel.no_sync, _pre_forward and _post_forward in torch/nn/parallel/distributed.py (2.13.0).
"""

from __future__ import annotations

import copy
from contextlib import nullcontext

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from equivtest.programs.examples.gated import spoil
from equivtest.programs.examples.token_mean import Report, TokenMean, change_buffers

NUMBER = 7
"""Extra state of `Outer`."""


class Outer(nn.Module):
    """Has a module in a wrapper of torch.compile that is never called, a number, and a buffer that no state has."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.inner = torch.compile(module, backend="eager")
        self.number = NUMBER
        self.register_buffer("mask", torch.zeros(1), persistent=False)

    def get_extra_state(self) -> int:
        return self.number

    def set_extra_state(self, state: int) -> None:
        self.number = state


class Unsynchronized(TokenMean):
    """Evaluates the module, and then runs all micro-batches except the last in `no_sync`.

    Before this evaluation, all ranks receive the buffers of the first rank. After a step, the buffers of all other
    ranks change, in the way in which running statistics follow a rank's own rows.
    """

    def run(self) -> Report:
        self.evaluate()
        report = super().run()
        self.reload()
        if self.mesh.get_local_rank():
            change_buffers(self.module)
        return report

    def evaluate(self) -> None:
        self.module.eval()
        with torch.no_grad():
            self.module(**self.micro_batches[0], reduction="sum")
        self.module.train()

    def reload(self) -> None:
        """Spoils all tensors of the module and the optimizer after their copies are taken, and loads these copies.

        torch names the tensors as if no wrapper were there. In every second step, copies are whole.
        """
        number = self.module.num_reloads = getattr(self.module, "num_reloads", 0) + 1
        outer = Outer(self.module)
        options = StateDictOptions(full_state_dict=number % 2 == 0)
        parameters, state = copy.deepcopy(get_state_dict(outer, self.optimizer, options=options))
        expected = {"_extra_state", *(f"inner.{name}" for name in self.module.module.state_dict())}
        if parameters.keys() != expected:
            raise AssertionError(f"get_state_dict has {list(parameters)}, expected {expected}")
        spoil((*self.module.parameters(), *self.module.buffers()))
        spoil(tensor for each in self.optimizer.state.values() for tensor in each.values())
        outer.number = 0
        set_state_dict(outer, self.optimizer, model_state_dict=parameters, optim_state_dict=state, options=options)
        if outer.number != NUMBER:
            raise AssertionError(f"set_state_dict loaded {outer.number}, expected {NUMBER}")

    def accumulate(self, number: int) -> None:
        with nullcontext() if self.reduces(number) else self.module.no_sync():
            self.run_micro_batch(number)


unsynchronized = Unsynchronized.step
