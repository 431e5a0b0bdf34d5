"""The real DeepSpeed: a perceptron trained by its ZeRO-1 and ZeRO-2 engines, whose parameters are whole on every rank.

All trained parameters form one flat tensor, of which each rank updates a part.  DeepSpeed's own mapping on this
rank says which part of a parameter that is.

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
    """Trains with DeepSpeed's ZeRO-1 or ZeRO-2 engine, according to the case."""
    return live(StagesRun(case, mesh, given, by_all_reduce=False))


class StagesRun(DeepSpeedRun):
    """One visit on this rank."""

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
    """Returns this rank's operand of a tensor with the parameter's shape: its part, in its place, between zeros."""
    whole = torch.zeros(parameter.shape, dtype=parameter.dtype)
    if held is not None:
        place = parameter._hp_mapping.lp_fragment_address
        whole.view(-1)[place.start : place.start + place.numel] = held.detach().reshape(-1)
    return whole
