"""Names of a parallel module's parts and tensors in the unsharded module, whatever wraps them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar
from weakref import WeakKeyDictionary

from torch import nn

T = TypeVar("T")

WRAPPERS = ("_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod")
"""Names of the module within torch's wrappers.

Source: torch.distributed.fsdp, torch.distributed.algorithms._checkpoint.checkpoint_wrapper, torch._dynamo.eval_frame
(2.13.0).
"""
HOLDERS = ("DistributedDataParallel", "DataParallel", "AveragedModel", "DeepSpeedEngine", "Float16Module")
"""Classes whose module is called 'module', by name, so that no library is imported.

Source: torch.nn.parallel and torch.optim.swa_utils (2.13.0), deepspeed.runtime.engine, megatron.core (0.12).
"""

_unsharded: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()
"""Names of the parts of unsharded modules that live in this process."""


def remember_names(whole: nn.Module) -> nn.Module:
    """Returns the unsharded module; its parts keep their names when a wrapper or another module takes them over."""
    for name, part in whole.named_modules():
        _unsharded[part] = ".".join(step for step in name.split(".") if step not in WRAPPERS)
    return whole


def own_names(module: nn.Module) -> Callable[[str], str]:
    """Returns the function from a part's or a tensor's name in a parallel module to its name in the unsharded one.

    A part that came from the unsharded module has its name there. Any other part is named by its place, without the
    name of the module within a wrapper. At the root, 'module' is such a name in a wrapper of any class.
    """

    def own_name(name: str) -> str:
        part, found = module, _unsharded.get(_innermost(module), "")
        for step in filter(None, name.split(".")):
            inner = part._modules.get(step)
            if inner is not None and (remembered := _unsharded.get(_innermost(inner))) is not None:
                found = remembered
            elif not _is_held(part, step, is_root=part is module):
                found = f"{found}.{step}".removeprefix(".")
            part = inner or part
        return found

    return own_name


def by_own_name(module: nn.Module, named: Iterable[tuple[str, T]]) -> dict[str, T]:
    """Returns parameters or buffers of a parallel module by their names in the unsharded one."""
    own_name = own_names(module)
    return {own_name(name): tensor for name, tensor in named}


def _innermost(part: nn.Module) -> nn.Module:
    """Returns the module within all wrappers around it."""
    inner = next((each for step, each in part._modules.items() if each and _is_held(part, step)), None)
    return _innermost(inner) if inner else part


def _is_held(part: nn.Module, step: str, *, is_root: bool = False) -> bool:
    """True if a part is a wrapper that calls its module so."""
    if step in WRAPPERS:
        return True
    is_holder = any(base.__name__ in HOLDERS for base in type(part).__mro__)
    return step == "module" and part not in _unsharded and (is_root or is_holder)
