"""DeepSpeed's engines, wrong in one way each; run inside ranks, by tests/families/test_deepspeed.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional

from equivtest.cases.subject import Answers, Given
from equivtest.families.training.deepspeed.case import EngineCase
from equivtest.families.training.deepspeed.subject import TAG, DeepSpeedRun, live
from equivtest.families.training.deepspeed.subject.stages import StagesRun
from equivtest.families.training.subject import Mlp


def started(case: EngineCase, mesh: DeviceMesh, given: Given) -> DeepSpeedRun:
    """An engine of the case's stage."""
    return (DeepSpeedRun if case.stage == 3 else StagesRun)(case, mesh, given, by_all_reduce=False)


def by_the_norm_of_a_rank(case: EngineCase, mesh: DeviceMesh, given: Given) -> Answers:
    """Each rank scales by the norm of its own partition."""
    visit = started(case, mesh, given)
    visit.engine.optimizer.get_grad_norm_direct = norm_of
    return live(visit)


def norm_of(gradients: Sequence[torch.Tensor], *_: Any) -> torch.Tensor:
    """The norm over all gradients together, in float32."""
    norms = [gradient.double().norm() for gradient in gradients]
    return torch.stack(norms).norm().float() if norms else torch.zeros(())


def by_the_largest_element(case: EngineCase, mesh: DeviceMesh, given: Given) -> Answers:
    """The largest magnitude stands for the norm."""
    visit = started(case, mesh, given)
    of_two = visit.engine.optimizer.get_grad_norm_direct
    visit.engine.optimizer.get_grad_norm_direct = lambda gradients, params, *_: of_two(gradients, params, float("inf"))
    return live(visit)


def not_at_all(case: EngineCase, mesh: DeviceMesh, given: Given) -> Answers:
    """The engine does not clip at all."""
    visit = started(case, mesh, given)
    visit.engine.optimizer.clip_grad = 0.0
    return live(visit)


def with_one_use_of_a_tied_weight(case: EngineCase, mesh: DeviceMesh, given: Given) -> Answers:
    """The second layer uses the tied weight beside the graph."""
    visit = started(case, mesh, given)
    out_proj = visit.model.out_proj
    out_proj.forward = lambda x: functional.linear(x, out_proj.weight.detach().t(), out_proj.bias)
    return live(visit)


def with_a_weight_untied(case: EngineCase, mesh: DeviceMesh, given: Given) -> Answers:
    """The engine is given a module whose second layer has a frozen copy of the weight."""

    def make_model(self: DeepSpeedRun) -> Mlp:
        model = Mlp(self.case, self.initial)
        model.out_proj.weight = nn.Parameter(model.in_proj.weight.detach().clone(), requires_grad=False)
        return model

    return live(of_kind(case, make_model=make_model)(case, mesh, given, by_all_reduce=False))


def scaled_before_alone(case: EngineCase, mesh: DeviceMesh, given: Given) -> Answers:
    """Stages 1 and 2: gradients are divided by the factor a second time, and never multiplied again."""
    visit = started(case, mesh, given)
    optimizer = visit.engine.optimizer
    reduce = optimizer.gradient_reduction_w_predivide
    optimizer.gradient_reduction_w_predivide = lambda tensor, dtype: reduce(tensor.div_(case.predivide_factor), dtype)
    return live(visit)


def loading_nothing(case: EngineCase, mesh: DeviceMesh, given: Given) -> Answers:
    """The fresh engine goes on with the values that it was made of."""
    return live(of_kind(case, load=lambda self, folder: None)(case, mesh, given, by_all_reduce=False))


def loading_no_states(case: EngineCase, mesh: DeviceMesh, given: Given) -> Answers:
    """The fresh engine loads parameters, and its optimizer begins anew."""

    def load(self: DeepSpeedRun, folder: str) -> None:
        self.engine.load_checkpoint(folder, tag=TAG, load_optimizer_states=False)

    return live(of_kind(case, load=load)(case, mesh, given, by_all_reduce=False))


def of_kind(case: EngineCase, **methods: Any) -> type[DeepSpeedRun]:
    """A visit of the case's stage with other methods."""
    return type("Changed", (DeepSpeedRun if case.stage == 3 else StagesRun,), methods)
