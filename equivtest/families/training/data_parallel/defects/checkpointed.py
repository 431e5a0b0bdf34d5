"""Activation checkpointing under data parallelism that is wrong in one way each."""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

from equivtest.families.training.data_parallel.case import DataParallelCase
from equivtest.families.training.data_parallel.subject import Fsdp2Run
from equivtest.families.training.subject import Mlp
from equivtest.families.training.zero3.subject import Zero3Run
from equivtest.families.training.zero3.subject.engine import Engine
from equivtest.families.training.zero3.subject.layer import Layer
from equivtest.families.zero3.fetch.subject import fetch_by_all_gather
from equivtest.kit.subject import Answers, Given


def parameters_left_out_of_the_recomputation(case: DataParallelCase, mesh: DeviceMesh, given: Given) -> Answers:
    """FSDP2 of a module that checkpoints by re-entering autograd, which records nothing unless x needs a gradient."""
    return _Reentrant(case, mesh, given).answers()


class _ReentrantMlp(Mlp):
    def run(self, part: str, function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        if part != self.checkpointed or x.requires_grad:
            return super().run(part, function, x)
        output: torch.Tensor = checkpoint(function, x, use_reentrant=True)
        return output


class _Reentrant(Fsdp2Run):
    def build(self) -> nn.Module:
        return self.shard(_ReentrantMlp(self.case, self.given), self.mesh)


class _TellingLayer(Layer):
    """Knows whether it is fetched for its own backward, or because its forward is run again there."""

    is_backward = False

    @property
    def is_run_again(self) -> bool:
        in_backward: bool = torch._C._current_graph_task_id() != -1
        return in_backward and not self.is_backward


class _TellingEngine(Engine):
    layer_class = _TellingLayer

    def before_backward_of(self, layer: Layer) -> None:
        assert isinstance(layer, _TellingLayer)
        layer.is_backward = True
        super().before_backward_of(layer)
        layer.is_backward = False


def recomputed_with_the_parameters_of_step_1(case: DataParallelCase, mesh: DeviceMesh, given: Given) -> Answers:
    """ZeRO-3 that computes again with what its first forward has fetched, and fetches for all else."""
    return _OfStep1(case, mesh, given, fetch_by_all_gather).answers()


class _LayerOfStep1(_TellingLayer):
    first: dict[str, torch.Tensor] | None = None

    def fetch(self) -> None:
        super().fetch()
        if self.first is None:
            self.first = {kind: parameter.detach().clone() for kind, parameter in self.parameters.items()}
        elif self.is_run_again:
            for kind, parameter in self.parameters.items():
                parameter.data = self.first[kind]


class _EngineOfStep1(_TellingEngine):
    layer_class = _LayerOfStep1


class _OfStep1(Zero3Run):
    engine_class = _EngineOfStep1


def whole_kept_after_the_recomputation(case: DataParallelCase, mesh: DeviceMesh, given: Given) -> Answers:
    """ZeRO-3 that keeps a layer whole which was computed again, as its own backward comes next."""
    return _Kept(case, mesh, given, fetch_by_all_gather).answers()


class _LayerKept(_TellingLayer):
    was_run_again = False

    def fetch(self) -> None:
        if not (self.is_backward and self.was_run_again):
            super().fetch()
        self.was_run_again = self.is_run_again

    def release(self, keeping: Collection[str] = ()) -> None:
        if not self.was_run_again:
            super().release(keeping)


class _KeepingEngine(_TellingEngine):
    layer_class = _LayerKept


class _Kept(Zero3Run):
    engine_class = _KeepingEngine
