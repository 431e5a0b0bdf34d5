"""Copies a rank's parameters, gradients and optimizer state before and after one `optimizer.step()`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from equivtest.captured.format.folder import AFTER, STATE, STATE_OF
from equivtest.captured.format.manifest import ParameterGroup
from equivtest.captured.write.job import Job, local_of
from equivtest.captured.write.keeper import Keeper
from equivtest.cases.case import require
from equivtest.errors import Misuse

WAYS = ("foreach", "fused", "capturable", "differentiable")
"""Options of an optimizer that choose its implementation and do not change the update."""


class UpdateKeeper(Keeper):
    def __init__(self, job: Job, optimizer: torch.optim.Optimizer, folder: Path) -> None:
        super().__init__(job, "", job.module, folder, (), ())
        self._updates = optimizer
        self._num_steps = 0

    def begin(self) -> None:
        """Records the optimizer's groups of parameters and registers hooks on its step.

        Raises:
            Misuse: the folder has another run, or the optimizer updates a tensor that is no parameter of the module.
        """
        self._require_empty()
        self._optimizer = type(self._updates).__name__, self._groups()
        self._hooks.callback(self._updates.register_step_pre_hook(self._before).remove)

    def finish(self) -> None:
        """Copies parameters and optimizer state after the update.  Raises Misuse unless the step ran exactly once."""
        num = self._num_steps
        require(num == 1, f"optimizer.step was called {num} times within the block: capture_update needs 1 call")
        for name in self._shapes:
            self._keep_like(name, f"{AFTER}param.{name}", self._shard_of(name)[0])
        self._keep_state(AFTER)

    def _before(self, *_: object) -> None:
        self._num_steps += 1
        if self._num_steps == 1:
            for name in self._shapes:
                self._keep_parameter("param.", name)
                self._keep_parameter("grad.", name)
            self._keep_state("")

    def _keep_state(self, when: str) -> None:
        for name in self._shapes:
            tensor, _ = self._shard_of(name)
            for key, value in self._updates.state.get(tensor, {}).items():
                what = f"{when}{STATE}{name}{STATE_OF}{key}"
                if value is None:
                    continue
                value = value if isinstance(value, torch.Tensor) else torch.tensor(float(value))
                if not value.dim():
                    self._keep(what, value)
                    continue
                is_alike = value.shape == tensor.shape and local_of(value).shape == local_of(tensor).shape
                require(
                    is_alike,
                    f"the optimizer's state {key} has another shape than its parameter {name}: only updates that treat "
                    "each element alone can be captured",
                )
                self._keep_like(name, what, value)

    def _groups(self) -> tuple[ParameterGroup, ...]:
        parameters = [(name, id(self._shard_of(name)[0])) for name in self._shapes]
        known = {place for _, place in parameters}
        groups = []
        for group in self._updates.param_groups:
            own = {id(each) for each in group["params"]}
            require(
                own <= known,
                "the optimizer updates a tensor that is no parameter of the captured module: pass the module that has "
                "all parameters of the optimizer",
            )
            options = {name: _plain(name, value) for name, value in group.items() if name not in ("params", *WAYS)}
            groups.append(ParameterGroup(tuple(name for name, place in parameters if place in own), options))
        return tuple(groups)


def _plain(name: str, value: Any) -> bool | int | float | tuple[float, ...] | None:
    """Converts the value of an optimizer's option to plain data.  Raises Misuse if a manifest cannot store it."""
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return float(value)
    if isinstance(value, tuple | list) and all(isinstance(each, int | float) for each in value):
        return tuple(float(each) for each in value)
    if value is None or isinstance(value, bool | int | float):
        return value
    raise Misuse(
        f"option {name} of the optimizer is {str(value)[:40]!r}, but a captured update can hold only numbers, "
        "bools, None and tuples of numbers"
    )
