"""Converts a captured update to a case, to the ranks' tensors before the update, and to right tensors after it."""

from __future__ import annotations

from dataclasses import replace

import torch

from equivtest.captured.format.folder import AFTER, STATE, STATE_OF, CapturedRun
from equivtest.captured.judge.evidence import Evidence, fields_of, unsharded
from equivtest.cases.case import Shape, require
from equivtest.layout import Layout, Replicate
from equivtest.oracle.expected import Expected
from equivtest.oracle.held import Held as Observed
from equivtest.programs.captured import UpdateCase
from equivtest.programs.oracle.update import Held, expect_update


def update_in(run: CapturedRun, reference: str) -> Evidence:
    """Collects the evidence from a captured update.  Raises Misuse for files that no update can have written."""
    manifest = run.manifest
    case = UpdateCase(**fields_of(run, reference), optimizer=f"torch.optim:{manifest.optimizer}")
    replicated = Layout((Replicate(),) * len(manifest.mesh))
    observed = {rank: {name: each.placed(name, replicated) for name in each} for rank, each in run.ranks.items()}
    parameters = {name: _parameter(run, observed, name, each.shape) for name, each in manifest.parameters.items()}
    names = [name for group in manifest.groups for name in group.parameters]
    require(
        len(set(names)) == len(names) and set(names) <= parameters.keys(),
        f"{run.folder}: the optimizer's groups must name only parameters of the run, and each at most once",
    )
    groups = [(group.parameters, group.options) for group in manifest.groups]
    left = expect_update(case, manifest.optimizer, groups, parameters)
    tensors = {f"{AFTER}param.{name}": value for name, (value, _) in left.items()}
    tensors |= {
        f"{AFTER}{_state_name(name, key)}": value for name, (_, state) in left.items() for key, value in state.items()
    }
    case = replace(case, left=tuple((name, tuple(each.value.shape)) for name, each in tensors.items()))
    inputs = {f"param.{name}": each.value for name, each in parameters.items()}
    inputs |= {f"grad.{name}": each.gradient for name, each in parameters.items() if each.gradient is not None}
    inputs |= {_state_name(name, key): value for name, each in parameters.items() for key, value in each.state.items()}
    return Evidence(case, Expected(tensors, {}), observed, inputs)


def _parameter(run: CapturedRun, observed: Observed, name: str, shape: Shape) -> Held:
    """Returns a parameter, its gradient and its optimizer state, assembled from the shards of all ranks.

    An entry of the state is a number, or a tensor of the parameter's shape.
    """

    def whole(tensor: str) -> torch.Tensor:
        return unsharded(run, observed, tensor, shape if observed[0][tensor].local.dim() else ())

    prefix, gradient = _state_name(name, ""), f"grad.{name}"
    return Held(
        unsharded(run, observed, f"param.{name}", shape),
        unsharded(run, observed, gradient, shape) if gradient in observed[0] else None,
        {tensor.removeprefix(prefix): whole(tensor) for tensor in observed[0] if tensor.startswith(prefix)},
    )


def _state_name(parameter: str, key: str) -> str:
    return f"{STATE}{parameter}{STATE_OF}{key}"
