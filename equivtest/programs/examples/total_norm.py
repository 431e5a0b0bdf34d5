"""Steps of training that clip by the norm of all gradients, however each parameter is divided.

torch clips DTensors of one mesh in one call, but refuses DTensors of several meshes beside plain tensors that only some
ranks have.  Such gradients are clipped in the way in which torchtitan clips experts beside other parameters. For each
group, the step computes a norm for all parameters that the group divides, and reduces that norm over the group. The
total norm is the norm of these norms.

Source: torch.nn.utils.clip_grad_norm_, get_total_norm and clip_grads_with_norm_, torch.amp.GradScaler (2.13.0);
torchtitan/distributed/utils.py, clip_grad_norm_ and _clip_grad_norm_with_ep.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, cast

import torch
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad_norm_, clip_grads_with_norm_, get_total_norm

from equivtest.programs.examples.mixture import MAX_NORM
from equivtest.programs.examples.mixture_plan import local

SCALES: dict[str, Any] = {"init_scale": 2.0**10, "backoff_factor": 0.125, "growth_factor": 4.0, "growth_interval": 2}
SCALE = 2.0**10
"""The scale after one backward that overflows, a doubling, and two backwards that do not: 2**10 / 8 * 2 * 4."""


class Clipped:
    """One step of training, which consists of forward, backward, clipping and update.

    Attributes:
        norm_type: Type of the norm: 1, 2 or math.inf.
        foreach: Argument of torch's functions. If True, torch takes several gradients in one operation. If None, torch
            decides. The value changes from step to step.
        raises: True if torch should raise when the norm is not finite.
        disabled: A scaler that must change nothing.
        norm: Norm of all gradients before clipping.
    """

    norm_type: ClassVar[float] = 2.0
    norm: torch.Tensor

    def __init__(self, module: Any, mesh: DeviceMesh, micro_batches: Any, optimizer: torch.optim.Optimizer) -> None:
        self.module, self.mesh, self.optimizer = module, mesh, optimizer
        (self.batch,) = micro_batches
        self.number: int = getattr(module, "num_steps", 0)
        module.num_steps = self.number + 1
        self.foreach = (False, True, None)[self.number % 3]
        self.raises = self.number % 2 == 1
        self.disabled = torch.amp.GradScaler(mesh.device_type, **SCALES, enabled=False)
        self.like = next(module.parameters())  # torch's norm of no gradients is a float32 on the CPU

    @classmethod
    def by(cls, norm_type: float) -> Callable[..., dict[str, torch.Tensor]]:
        """Returns the step of this class with another type of norm."""
        kind: type[Clipped] = type(cls.__name__, (cls,), {"norm_type": norm_type})
        return kind.step

    @classmethod
    def step(cls, *given: Any) -> dict[str, torch.Tensor]:
        """Runs the step. The arguments are module, mesh, micro_batches and optimizer, as for `Training.step`."""
        return cls(*given).run()

    def run(self) -> dict[str, torch.Tensor]:
        loss: Any = self.disabled.step(self.optimizer, self.compute)
        self.disabled.update()
        return {"loss": loss.detach(), "total_norm": self.norm}

    def compute(self) -> torch.Tensor:
        """Computes and clips all gradients, as a closure that the optimizer calls. Returns the loss."""
        self.optimizer.zero_grad()
        loss: torch.Tensor = self.module(**self.batch)["loss"]
        torch.autograd.backward(self.disabled.scale(loss))
        self.disabled.unscale_(self.optimizer)
        self.norm = self.clip()
        return loss

    def clip(self) -> torch.Tensor:
        """Clips all gradients by their total norm. Returns the norm before clipping."""
        raise NotImplementedError

    def norm_of(self, tensors: list[torch.Tensor]) -> torch.Tensor:
        """Returns the norm of plain tensors on this rank, or of DTensors over all ranks."""
        kept = [each for each in tensors if each.numel()]  # an empty tensor has no largest element
        norm = get_total_norm(kept, self.norm_type, foreach=self.foreach)
        return (norm.full_tensor() if isinstance(norm, DTensor) else norm).to(self.like.device, self.like.dtype)


class InOneCall(Clipped):
    """Clips DTensors on one mesh by `clip_grad_norm_`, or by the two functions that it calls.

    Attributes:
        copies: True if float64 copies of every second parameter are clipped beside all other parameters. Such copies
            are the main parameters of mixed precision.
    """

    copies: ClassVar[bool] = True

    def clip(self) -> torch.Tensor:
        parameters = self.widened() if self.copies else list(self.module.parameters())
        norm = self.clip_together(parameters)
        for parameter, copy in zip(self.module.parameters(), parameters, strict=True):
            if copy is not parameter and parameter.grad is not None:
                parameter.grad.copy_(copy.grad)
        return norm

    def widened(self) -> list[torch.Tensor]:
        """Returns float64 copies of every second parameter, with their gradients, and the other parameters."""
        widened: list[torch.Tensor] = list(self.module.parameters())
        for number in range(0, len(widened), 2):
            parameter = widened[number]
            widened[number] = parameter.detach().double()
            widened[number].grad = None if parameter.grad is None else parameter.grad.double()
        return widened

    def clip_together(self, parameters: list[torch.Tensor]) -> torch.Tensor:
        """Clips parameters of several dtypes by one norm, and returns the norm before clipping."""
        if self.raises:
            gradients = [each.grad for each in parameters if each.grad is not None]
            norm = get_total_norm(gradients, self.norm_type, error_if_nonfinite=True, foreach=self.foreach)
            clip_grads_with_norm_(parameters, MAX_NORM, norm, foreach=self.foreach)
        else:
            norm = clip_grad_norm_(parameters, MAX_NORM, self.norm_type, foreach=self.foreach)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm


class ByGroups(Clipped):
    """Clips DTensors on several meshes, and plain tensors."""

    def clip(self) -> torch.Tensor:
        total = self.combined(self.norms())
        for alike in (*self.on_meshes(parameters=True).values(), self.plain()):
            clip_grads_with_norm_(alike, MAX_NORM, total, foreach=self.foreach)
        return total

    def norms(self) -> list[torch.Tensor]:
        """Returns one norm for each mesh, one for each group, and last the norm of the tensors that all ranks share."""
        on_meshes = [self.norm_of(gradients) for gradients in self.on_meshes().values()]
        in_groups = [self.over_group(gradients, group) for group, gradients in self.in_groups().items()]
        return [*on_meshes, *in_groups, self.norm_of(self.on_all_ranks())]

    def graded(self) -> dict[str, torch.Tensor]:
        return {name: each for name, each in self.module.named_parameters() if each.grad is not None}

    def on_meshes(self, *, parameters: bool = False) -> dict[DeviceMesh, list[torch.Tensor]]:
        """Returns mesh -> gradients that are DTensors on the mesh, or the parameters instead of their gradients."""
        by_mesh: dict[DeviceMesh, list[torch.Tensor]] = {}
        for each in self.graded().values():
            if isinstance(each, DTensor):
                by_mesh.setdefault(each.device_mesh, []).append(each if parameters else cast("torch.Tensor", each.grad))
        return by_mesh

    def plain(self) -> list[torch.Tensor]:
        return [each for each in self.graded().values() if not isinstance(each, DTensor)]

    def in_groups(self) -> dict[distributed.ProcessGroup, list[torch.Tensor]]:
        """Returns group -> gradients of plain tensors that differ on each rank of the group. A rank may have none."""
        by_group: dict[distributed.ProcessGroup, list[torch.Tensor]] = {}
        graded = self.graded()
        for name, group in self.module.groups.items():
            own = by_group.setdefault(group, [])
            if name in graded:
                own.append(cast("torch.Tensor", graded[name].grad))
        return by_group

    def on_all_ranks(self) -> list[torch.Tensor]:
        alike = {name: each for name, each in self.graded().items() if name not in self.module.groups}
        return [cast("torch.Tensor", each.grad) for each in alike.values() if not isinstance(each, DTensor)]

    def over_group(self, gradients: list[torch.Tensor], group: distributed.ProcessGroup) -> torch.Tensor:
        own = self.norm_of(gradients)
        if math.isinf(self.norm_type):
            distributed.all_reduce(own, distributed.ReduceOp.MAX, group=group)
            return own
        power = own**self.norm_type
        distributed.all_reduce(power, group=group)
        return power ** (1 / self.norm_type)

    def combined(self, norms: list[torch.Tensor]) -> torch.Tensor:
        return self.norm_of(norms)


class Scaled(InOneCall):
    """Scales the loss by torch's GradScaler. An infinity on one rank alone must stop the update on all ranks.

    The scaler's factors are not torch's defaults. Its state is loaded into a new scaler between two backwards without
    overflow, after which the scale grows. The reported loss is in proportion to the scale at the end of the step.

    In every second step the scaler itself unscales the gradients, when it updates. Such a step clips scaled gradients.
    In the other steps the new scaler has scaled a loss before it loads the state.
    """

    copies = False

    def run(self) -> dict[str, torch.Tensor]:
        scaler = self.made_scaler()
        loss = self.module(**self.batch)["loss"]
        self.attempt(scaler, loss, overflows=True)
        doubled = 2 * scaler.get_scale()
        scaler.update(torch.tensor(doubled, device=loss.device) if self.raises else doubled)
        self.optimizer.zero_grad(set_to_none=self.raises)
        torch.autograd.backward(scaler.scale(loss), retain_graph=True)
        self.unscale_copies(scaler)
        scaler.update()
        state, scaler = scaler.state_dict(), torch.amp.GradScaler(self.mesh.device_type)
        if self.raises:
            scaler.scale(loss)
        scaler.load_state_dict(state)
        norm = self.attempt(scaler, loss, overflows=False)
        return {"loss": loss.detach() * (scaler.get_scale() / SCALE), "total_norm": norm}

    def made_scaler(self) -> torch.amp.GradScaler:
        """Makes a scaler by arguments, or in every second step by calls that set its factors."""
        if self.raises:
            return torch.amp.GradScaler(self.mesh.device_type, **SCALES)
        scaler = torch.amp.GradScaler(self.mesh.device_type, init_scale=SCALES["init_scale"])
        scaler.set_backoff_factor(SCALES["backoff_factor"])
        scaler.set_growth_factor(SCALES["growth_factor"])
        scaler.set_growth_interval(SCALES["growth_interval"])
        return scaler

    def unscale_copies(self, scaler: torch.amp.GradScaler) -> None:
        """Unscales gradients of two dtypes in one call.

        Raises:
            AssertionError: a gradient is not exactly as it was, divided by the scale, which is a power of two.
        """
        parameters = self.widened()
        gradients = [each.grad for each in parameters if each.grad is not None]
        right = [local(each) / scaler.get_scale() for each in gradients]
        scaler.unscale_(torch.optim.SGD(parameters))
        for each, expected in zip(gradients, right, strict=True):
            if not torch.equal(local(each), expected):
                raise AssertionError(f"unscale_ left {local(each)} of {each.dtype}, expected {expected}")

    def attempt(self, scaler: torch.amp.GradScaler, loss: torch.Tensor, *, overflows: bool) -> torch.Tensor:
        """Runs backward, clipping and update, and returns the norm. If a gradient is infinite, no rank updates."""
        self.optimizer.zero_grad()
        (scaled,) = scaler.scale((loss,))
        torch.autograd.backward(scaled, retain_graph=overflows)
        if overflows:
            self.overflow()
            self.unscale_another(scaler)
        if self.raises:
            self.unscale(scaler)
            norm = self.refused(loss) if overflows else self.clip()
        else:
            norm = self.clip_scaled(scaler.get_scale())
        self.update(scaler)
        return norm

    def clip_scaled(self, scale: float) -> torch.Tensor:
        """Clips gradients that are still scaled by a power of two. Returns the norm of the unscaled gradients."""
        parameters = list(self.module.parameters())
        norm = get_total_norm([each.grad for each in parameters if each.grad is not None], self.norm_type) / scale
        clip_grads_with_norm_(parameters, MAX_NORM, norm, foreach=self.foreach)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def unscale_another(self, scaler: torch.amp.GradScaler) -> None:
        """Unscales the finite gradient of another optimizer first. The scale must back off for the second."""
        parameter = torch.nn.Parameter(torch.zeros((), device=self.like.device))
        parameter.grad = torch.ones_like(parameter)
        scaler.unscale_(torch.optim.SGD([parameter]))

    def refused(self, norm: torch.Tensor) -> torch.Tensor:
        """Clips while one gradient is infinite, and then while it is NaN. Both must raise on every rank.

        Returns `norm` unchanged.

        Raises:
            AssertionError: torch does not raise.
        """
        parameters = list(self.module.parameters())
        for clip in (self.clip, partial(clip_grad_norm_, parameters, MAX_NORM, error_if_nonfinite=True)):
            try:
                clip()
            except RuntimeError:
                self.overflow(math.nan)
                continue
            raise AssertionError("error_if_nonfinite=True, a gradient is not finite, and clipping did not raise")
        return norm

    def overflow(self, value: float = math.inf) -> None:
        """Sets one element of a gradient on one rank. Each step takes another parameter."""
        parameter = self.module.get_parameter(("both", "tensor", "data")[self.number % 3])
        if self.mesh.get_rank() == self.mesh.mesh.max():
            local(parameter.grad)[-1, -1] = value

    def unscale(self, scaler: torch.amp.GradScaler) -> None:
        scaler.unscale_(self.optimizer)

    def update(self, scaler: torch.amp.GradScaler) -> None:
        scaler.step(self.optimizer)
        scaler.update()


in_one_call_by_root, in_one_call_by_largest = InOneCall.step, InOneCall.by(math.inf)
in_one_call_by_sum = InOneCall.by(1.0)
by_groups_by_root, by_groups_by_largest = ByGroups.step, ByGroups.by(math.inf)
scaled = Scaled.step
