"""The unsharded module."""

from __future__ import annotations

import torch
from torch.func import functional_call

from equivtest.programs.case import ModuleCase, call_builder
from tests.unsharded import answers_of, unsharded


@unsharded.register
def unsharded_module(case: ModuleCase, index: int) -> dict[str, torch.Tensor]:
    module = call_builder(case.build)

    def forward(given: dict[str, torch.Tensor]) -> torch.Tensor:
        module.to(given["x"].dtype)  # buffers, too
        return functional_call(module, {name: given[name] for name in case.parameter_names()}, (given["x"],))

    return answers_of(case, index, forward)
