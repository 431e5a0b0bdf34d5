"""Activation checkpointing under data parallelism that is wrong in one way each."""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from equivtest.families.training.data_parallel.case import DataParallelCase
from equivtest.families.training.data_parallel.subject import Fsdp2Run
from equivtest.families.training.subject import Mlp
from equivtest.families.training.zero3.subject import Zero3Run
from equivtest.families.training.zero3.subject.engine import Engine
from equivtest.families.training.zero3.subject.layer import Layer
from equivtest.families.zero3.fetch.subject import fetch_by_all_gather
from tests.defects.defect import Replacing, answers_of

wrong_fsdp2 = Replacing("fsdp2_mlp")
wrong_zero3_all_gather = Replacing("zero3_mlp_all_gather")

_WEIGHTS = ("in_proj.weight", "out_proj.weight")


class _ReentrantMlp(Mlp):
    def run(self, part: str, function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        if part != self.checkpointed or x.requires_grad:
            return super().run(part, function, x)
        output: torch.Tensor = checkpoint(function, x, use_reentrant=True)
        return output


class _Reentrant(Fsdp2Run):
    """FSDP2 of a module that checkpoints by re-entering autograd, which records nothing unless x needs a gradient."""

    def build(self) -> nn.Module:
        return self.shard(_ReentrantMlp(self.case, self.given), self.mesh)


parameters_left_out_of_the_recomputation = wrong_fsdp2(
    "flags",
    DataParallelCase(world_size=1, style="fsdp2", checkpointed="in_proj", requires_grad=_WEIGHTS),
    "one rank; x needs no gradient, the layer's weight does, and another one lets the backward begin",
    claim="gradients_equal_unsharded",
    kind="shape",
)(answers_of(_Reentrant))


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
    """ZeRO-3 that recomputes with the parameters of its first forward, and fetches for every other use."""

    engine_class = _EngineOfStep1


recomputed_with_the_parameters_of_step_1 = wrong_zero3_all_gather(
    "state across steps",
    DataParallelCase(
        world_size=1,
        style="zero3",
        fetch="all_gather",
        checkpointed="hidden",
        requires_grad=("in_proj.weight",),
        optimizer="sgd",
        steps=2,
    ),
    "one weight, updated once, is another one from the second step on",
    claim="trains_like_unsharded",
)(answers_of(_OfStep1, fetch_by_all_gather))


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
    """ZeRO-3 that keeps a layer whole which was computed again, as its own backward comes next."""

    engine_class = _KeepingEngine


whole_kept_after_the_recomputation = wrong_zero3_all_gather(
    "other collectives than documented",
    DataParallelCase(
        world_size=1,
        style="zero3",
        fetch="all_gather",
        checkpointed="hidden",
        requires_grad=("in_proj.weight",),
        records=True,
    ),
    "one rank fetches as others do; one fetch in the backward is missing",
    claim="uses_only_collectives",
)(answers_of(_Kept, fetch_by_all_gather))
