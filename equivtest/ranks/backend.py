"""Describes a backend by its name, its device, and the modules to import first."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from equivtest.errors import Misuse

if TYPE_CHECKING:
    import torch

STARTS = ("auto", "forkserver", "spawn")


@dataclass(frozen=True)
class Backend:
    """The backend of torch.distributed and the device on which the ranks run.

    Attributes:
        name: Name of the process group's backend, as for torch.distributed.init_process_group.
        device: Type of the tensors' device, such as 'cpu' or 'cuda', without an index.
        imports: Modules that every rank imports first, such as a vendor's torch backend.
        start: How ranks start. If 'forkserver', ranks are forked from a server that has imported torch and `imports`,
            and has not used the device. If 'spawn', each rank is a new interpreter. If 'auto', ranks are forked if a
            fork of the server can run a backward on the device. Otherwise each rank is a new interpreter.
        arithmetic: 'package.module:NAME' of the object that declares how the backend rounds. equivtest computes the
            bounds of errors from this object. If '', the bounds are for the rounding of torch's kernels on the CPU and
            of gloo.
        faults: True if the ranks' process groups can spoil collectives, which an audit needs.
    """

    name: str = "gloo"
    device: str = "cpu"
    imports: tuple[str, ...] = ()
    start: str = "auto"
    arithmetic: str = ""
    faults: bool = False

    @property
    def is_gloo_on_cpu(self) -> bool:
        """True for gloo on the CPU. Failing cases of any other backend run again on gloo and the CPU for comparison."""
        return (self.name, self.device) == ("gloo", "cpu")

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables of ranks and of the server that forks the ranks.

        On the CPU the variables hide CUDA's cards.

        If torch sees no card, torch starts no thread for a card, so ranks can be forked on a machine with cards too.
        Source: CUDA C++ Programming Guide, "CUDA Environment Variables"; Engine::start_device_threads of
        torch/csrc/autograd/engine.cpp (2.13.0).
        """
        return {"CUDA_VISIBLE_DEVICES": ""} if self.device == "cpu" else {}

    def validate(self) -> None:
        """Checks in this process that torch knows the backend and has the device.

        Raises:
            Misuse: torch lacks the backend or the device. The message lists the available backends or devices.
        """
        if self.start not in STARTS:
            raise Misuse(f"start must be one of {', '.join(STARTS)}, got {self.start!r}")
        for module in self.imports:
            _import(module)
        _check_device(self.device)
        _check_name(self.name, self.device)


def _import(module: str) -> None:
    try:
        importlib.import_module(module)
    except Exception as error:  # a vendor's module may raise anything
        is_missing = isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}.")
        is_missing = is_missing or not all(part.isidentifier() for part in module.split("."))
        way_out = "name a module that is installed here" if is_missing else "fix this error in the module"
        raise Misuse(
            f"cannot import {module!r}: {type(error).__name__}: {error}; {way_out}, or leave the import out"
        ) from error


def _check_device(device: str) -> None:
    import torch

    try:
        kind = torch.device(device)
    except RuntimeError as error:
        raise Misuse(f"torch has no device type {device!r}; {_devices_here()}") from error
    if kind.index is not None:
        raise Misuse(f"device must not have an index, got {device!r}: each rank takes its own; use {kind.type!r}")
    if kind.type != "cpu" and not _is_available(kind.type):
        raise Misuse(f"no device {device!r} is available here; {_devices_here()}")


def _is_available(kind: str) -> bool:
    import torch

    try:
        return bool(torch.get_device_module(kind).is_available())
    except (RuntimeError, AttributeError):
        return False


def _devices_here() -> str:
    import torch

    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    found = "cpu" if accelerator is None else f"cpu and {accelerator.type}"
    return f"available here: {found}; import a vendor's module to add its device"


def _check_name(name: str, device: str) -> None:
    """Raises Misuse unless torch has every backend in `name` and one of these backends serves the device.

    `name` is one backend, such as 'gloo', or a list by device, such as 'cpu:gloo,cuda:nccl'.
    """
    import torch.distributed as dist

    if not dist.is_available():
        raise Misuse("this torch is built without torch.distributed; install one that has it")
    known = [known for known in dist.Backend.backend_list if known != "undefined"]
    here = [known for known in known if dist.is_backend_available(known)]
    devices: set[str] = set()
    for part in name.lower().split(","):
        kind, _, backend = part.rpartition(":")
        if backend not in here:
            raise Misuse(
                f"torch has no backend {backend!r} here; available: {', '.join(here)}; "
                "import a vendor's module to register its own"
            )
        devices |= {kind} if kind else set(dist.Backend.backend_capability.get(backend, [device]))
    if device not in devices:
        raise Misuse(f"backend {name!r} serves {', '.join(sorted(devices))}, not device {device!r}; choose one of them")


def choose_device(backend: Backend, rank: int) -> torch.device:
    """Makes a device current for this rank and returns it. Ranks use the machine's devices in turn.

    On CUDA the function also calls `use_full_precision`.
    """
    import torch

    if backend.device == "cpu":
        return torch.device("cpu")
    module = torch.get_device_module(backend.device)
    index = rank % module.device_count()
    module.set_device(index)
    if backend.device == "cuda":
        use_full_precision()
    return torch.device(backend.device, index)


def use_full_precision() -> None:
    """Makes CUDA's matrix products and convolutions as exact as the bounds assume.

    By default, CUDA may round the partial sums of a product to its 16-bit dtype, and may round the operands of a
    float32 convolution to TF32.  Source: "Numerical Accuracy" and "CUDA semantics" of torch's notes (2.13.0).
    """
    import torch

    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    torch._C._set_cudnn_allow_tf32(False)  # noqa: FBT003  # the attribute raises after disable_global_flags()
