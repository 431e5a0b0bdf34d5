"""A step of training that resumes from the state of an earlier step, as after a restart of the job.

Copies of the parameters are assigned, and the optimizer is made anew, with its groups of parameters in another order.
Its state is then loaded by the names of the parameters, in one of several forms. One of them is a folder of files.

Source: torch.nn.Module.load_state_dict with `assign`, and the functions and StateDictOptions of
torch/distributed/checkpoint/state_dict.py (2.13.0).
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from equivtest.programs.examples.next_token import NextToken
from equivtest.programs.examples.plans import fully_sharded, fully_sharded_by_layers, shared_folder
from equivtest.programs.examples.token_mean import TokenMean

SGD: tuple[dict[str, Any], dict[str, Any]] = ({"lr": 0.0625, "momentum": 0.25}, {"lr": 0.25, "momentum": 0.5})
ADAMW: tuple[dict[str, Any], dict[str, Any]] = (
    {"lr": 0.0625, "betas": (0.5, 0.75), "eps": 0.25, "weight_decay": 0.25, "amsgrad": True},
    {"lr": 0.125, "betas": (0.75, 0.5), "eps": 0.125, "weight_decay": 0.5},
)
"""Options of an optimizer for the parameters of the norm, and for the others."""
FROZEN = "head"
"""Part of the name of each parameter that is frozen while a state is saved. It trains before and after."""
_WHOLE = StateDictOptions(full_state_dict=True)
FILES, FLAT, TRAINED = "files", "flat", "trained"
_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
FORMS = {
    "shards": (StateDictOptions(), StateDictOptions()),
    "whole": (_WHOLE, _WHOLE),
    "rank 0": (
        StateDictOptions(full_state_dict=True, cpu_offload=True),
        StateDictOptions(full_state_dict=True, broadcast_from_rank0=True),
    ),
    FLAT: (_FLAT, _FLAT),
    TRAINED: (StateDictOptions(ignore_frozen_params=True, cpu_offload=True), StateDictOptions(strict=False)),
    FILES: (StateDictOptions(), StateDictOptions()),
}
"""Form of the optimizer's state -> options with which it is saved, and with which it is loaded.

Each rank has its shards, the whole state, or shards in one flat dict; or rank 0 alone has the whole state. 'trained'
has the shards on the CPU, without the parameters that are frozen when it is saved. Or the ranks write their shards,
with the parameters, into files and read them.
"""


def resumable(block: Any, mesh: DeviceMesh, *, state: str, together: bool) -> nn.Module:
    """Shards each layer, and the rest of the block.

    Args:
        state: The form of the optimizer's state, a name in `FORMS`.
        together: Whether the parameters are saved and loaded with the optimizer's state, and released after the
            forward. Otherwise copies of the parameters are assigned. They always are if rank 0 alone has the state,
            because in set_state_dict the ranks then wait for each other (finding 140). Files always have both.
    """
    block.form_of_state, block.loads_together = state, together and state != "rank 0"
    if block.is_tied:
        fully_shard([block.embedding, block.head], mesh=mesh, reshard_after_forward=together)
        fully_shard(block.norm, mesh=mesh, reshard_after_forward=together)
        return fully_sharded(block, mesh)
    return fully_sharded_by_layers(block, mesh, reshard_after_forward=together)


class ResumableNextToken(NextToken):
    """A model of the next token that names its optimizers: 'SGD', 'AdamW', or 'both'. Of both, AdamW has the norm.

    If it has both, its embedding and its head share their weight.
    """

    def __init__(self, optimizers: str) -> None:
        super().__init__()
        self.optimizers, self.is_tied = optimizers, optimizers == "both"
        if self.is_tied:
            self.head.weight = self.embedding.weight


def resumable_next_token(*, optimizers: str) -> nn.Module:
    return ResumableNextToken(optimizers)


class Resumable(torch.optim.Optimizer):
    """One optimizer with two groups of parameters, or two optimizers. Their module and states can be loaded again.

    Attributes:
        inner: The optimizers that update.
    """

    def __init__(self, module: Any) -> None:
        self.module = module
        self.inner = self.made(norm_first=False)
        super().__init__([group for each in self.inner for group in each.param_groups], {})

    def made(self, *, norm_first: bool) -> list[torch.optim.Optimizer]:
        """Makes the optimizers. One optimizer has a last group without parameters.

        A flat state cannot have such a group. It is the last, because torch takes the options of the last group for it
        (finding 176).
        """
        named, kind = dict(self.module.named_parameters()), self.module.optimizers
        norm = [each for name, each in named.items() if "norm" in name]
        others = [each for name, each in named.items() if "norm" not in name]
        if kind == "both":
            return [torch.optim.AdamW(norm, **ADAMW[0]), torch.optim.SGD(others, **SGD[1])]
        first, options = ADAMW if kind == "AdamW" else SGD
        groups: list[dict[str, Any]] = [{"params": norm, **first}, {"params": others, **options}]
        groups = groups if norm_first else groups[::-1]
        if getattr(self.module, "form_of_state", "") != FLAT:
            groups.append({"params": [], **options})
        return [getattr(torch.optim, kind)(groups)]

    def made_again(self) -> list[torch.optim.Optimizer]:
        """Makes the optimizers of a restarted job. Their options are wrong until the state is loaded."""
        optimizers = self.made(norm_first=True)
        for group in (group for each in optimizers for group in each.param_groups):
            group |= {name: group[name] / 2 for name in ("lr", "eps", "momentum", "weight_decay") if name in group}
            group |= {name: group[name][::-1] for name in ("betas",) if name in group}
        return optimizers

    def step(self, closure: Any = None) -> Any:
        """Updates twice. So an AdamW has not counted as many updates as a new one, in which torch makes a state."""
        for each in self.inner * 2:
            each.step()

    def zero_grad(self, set_to_none: bool = True) -> None:  # noqa: FBT001, FBT002  # torch's signature
        for each in self.inner:
            each.zero_grad(set_to_none)

    def resume(self) -> None:
        """Loads the parameters and the states into new optimizers, after the earlier parameters are spoiled."""
        saves, loads = FORMS[self.module.form_of_state]
        if self.module.form_of_state == FILES:
            self.resume_from_files()
            return
        if not self.module.loads_together:
            with self.frozen():
                state = get_optimizer_state_dict(self.module, self.inner, options=saves)
            copies = {name: tensor.clone() for name, tensor in self.module.state_dict().items()}
            self.spoil()
            self.module.load_state_dict(copies, assign=not self.module.is_tied)
            self.inner = self.made_again()
            set_optimizer_state_dict(self.module, self.inner, state, options=loads)
            return
        with self.frozen() as frozen:
            parameters, state = get_state_dict(self.module, self.inner, options=saves)
        parameters = copy.deepcopy(parameters)
        if saves.ignore_frozen_params and frozen.keys() & parameters.keys():
            raise RuntimeError(f"a state without frozen parameters has one: {list(parameters)}")
        self.spoil(except_for=tuple(frozen.values()) if saves.ignore_frozen_params else ())
        self.inner = self.made_again()
        set_state_dict(self.module, self.inner, model_state_dict=parameters, optim_state_dict=state, options=loads)

    def resume_from_files(self) -> None:
        group = next(self.module.parameters()).device_mesh.get_group()
        with shared_folder(group) as folder:
            with self.frozen():
                save({"application": Application(self.module, self.inner)}, checkpoint_id=folder, process_group=group)
            self.spoil()
            self.inner = self.made_again()
            load({"application": Application(self.module, self.inner)}, checkpoint_id=folder, process_group=group)

    @contextmanager
    def frozen(self) -> Iterator[dict[str, nn.Parameter]]:
        """Freezes some parameters, unless no optimizer has a state. torch makes no state for a frozen parameter.

        Yields name -> frozen parameter. A weight that the embedding and the head share has the embedding's name.
        """
        has_state = all(each.state for each in self.inner)
        frozen = {name: each for name, each in self.module.named_parameters() if FROZEN in name and has_state}
        for parameter in frozen.values():
            parameter.requires_grad_(requires_grad=False)
        yield frozen
        for parameter in frozen.values():
            parameter.requires_grad_()

    def spoil(self, *, except_for: Sequence[nn.Parameter] = ()) -> None:
        """Spoils the parameters, and clears their gradients, which a restarted job does not have.

        While a parameter has a gradient, torch makes no state for a new optimizer (`_init_optim_state`). So it has no
        place for a flat or a whole state.
        """
        kept = {id(each) for each in except_for}
        for parameter in self.module.parameters():
            assert isinstance(parameter, DTensor)
            if id(parameter) not in kept:
                parameter.to_local().detach().fill_(torch.nan)
            parameter.grad = None


class Application:
    """Object that torch.distributed.checkpoint saves and loads by its methods, as in torch's recipe."""

    def __init__(self, module: nn.Module, optimizers: list[torch.optim.Optimizer]) -> None:
        self.module, self.optimizers = module, optimizers

    def state_dict(self) -> dict[str, Any]:
        parameters, state = get_state_dict(self.module, self.optimizers)
        return {"model": parameters, "optimizer": state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(
            self.module, self.optimizers, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )


class Failure(Exception):
    pass


def fail(gradient: torch.Tensor) -> None:
    raise Failure


def fail_in_backward(module: nn.Module, ids: Any, output: torch.Tensor) -> None:
    output.register_hook(fail)  # type: ignore[no-untyped-call]


class Resumed(TokenMean):
    """The step of `TokenMean`, before which a backward fails, and the module and the optimizers are loaded again.

    The first step does so too, unless an AdamW trains. torch makes the state of a new optimizer by an update with zero
    gradients and rates, which an AdamW counts. No group of SGD has weight decay, because then this update changes the
    momentum.
    """

    optimizer: Resumable

    def begin(self) -> None:
        if hasattr(self.module, "reset_iter_state") and not self.module.is_tied:  # since 2.13
            self.run_failing()
        if self.module.optimizers == "SGD" or self.optimizer.inner[0].state:
            self.optimizer.resume()
        super().begin()

    def update(self) -> None:
        """Updates. If no optimizer has a state, gets the optimizers' state first. torch then makes the state."""
        if not any(each.state for each in self.optimizer.inner):
            get_optimizer_state_dict(self.module, self.optimizer.inner)
        super().update()

    def run_failing(self) -> None:
        """Runs a backward that raises behind the embedding. Every other layer reduces its gradients before.

        If a group of parameters is not reduced before, torch adds its gradients to the next ones. See finding 162. The
        group of a shared weight is none that can be reduced before.
        """
        hook = self.module.embedding.register_forward_hook(fail_in_backward)
        with suppress(Failure):
            self.run_micro_batch(0)
        hook.remove()
        self.losses.clear()
        self.module.reset_iter_state()
        self.optimizer.zero_grad()


resumed = Resumed.step
