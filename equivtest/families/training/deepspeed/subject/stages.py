"""Subject that trains a perceptron with DeepSpeed's ZeRO-1 and ZeRO-2 engines, which replicate parameters.

All trained parameters form one flat tensor, and each rank updates a contiguous range of it. DeepSpeed's own mapping on
this rank says which elements of a parameter lie in that range.

Source: deepspeed/runtime/zero/stage_1_and_2.py; deepspeed/utils/tensor_fragment.py, class
tensor_fragment (0.19.8).
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from equivtest.cases.subject import Answers, Given
from equivtest.families.training.deepspeed.case import EngineCase
from equivtest.families.training.deepspeed.subject import DeepSpeedRun, live
from equivtest.families.training.subject import STATE_KEYS


def deepspeed_mlp_stages_1_and_2(case: EngineCase, mesh: DeviceMesh, given: Given) -> Answers:
    return live(StagesRun(case, mesh, given, by_all_reduce=False))


class StagesRun(DeepSpeedRun):
    def stage_config(self) -> dict[str, object]:
        return {}

    def parameter(self, name: str) -> torch.Tensor:
        return self.model.get_parameter(name)

    def gradient(self, name: str) -> torch.Tensor | None:
        parameter: Any = self.model.get_parameter(name)
        mapping = parameter._hp_mapping
        held = None if mapping is None else mapping.get_lp_grad_fragment(parameter._index_in_param_group)
        return operand(parameter, held)

    def state_held(self, optimizer: torch.optim.Optimizer, state: str, name: str) -> torch.Tensor | None:
        parameter: Any = self.model.get_parameter(name)
        if state == "param":
            return parameter  # type: ignore[no-any-return]
        mapping = parameter._hp_mapping
        return operand(parameter, None if mapping is None else mapping.get_hp_fragment(STATE_KEYS[state]))


def operand(parameter: Any, held: torch.Tensor | None) -> torch.Tensor:
    """Returns a tensor of the parameter's shape, with zeros except for this rank's elements `held`."""
    whole = torch.zeros(parameter.shape, dtype=parameter.dtype)
    if held is not None:
        place = parameter._hp_mapping.lp_fragment_address
        whole.view(-1)[place.start : place.start + place.numel] = held.detach().reshape(-1)
    return whole
