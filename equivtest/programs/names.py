"""Finds the names that submodules and tensors of a parallel module have in the unsharded module.

The submodules may be within wrappers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar
from weakref import WeakKeyDictionary

from torch import nn

T = TypeVar("T")

WRAPPERS = ("_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod")
"""Attributes under which torch's wrappers hold the wrapped module.

Source: torch.distributed.fsdp, torch.distributed.algorithms._checkpoint.checkpoint_wrapper, torch._dynamo.eval_frame
(2.13.0).
"""
HOLDERS = ("DistributedDataParallel", "DataParallel", "AveragedModel", "DeepSpeedEngine", "Float16Module")
"""Names of classes that hold the wrapped module as `module`; names, so that no library is imported.

Source: torch.nn.parallel and torch.optim.swa_utils (2.13.0), deepspeed.runtime.engine, megatron.core (0.12).
"""

_unsharded: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()
"""Submodule of an unsharded module -> its name there; an entry lives as long as the submodule."""


def remember_names(whole: nn.Module) -> nn.Module:
    """Records the names of a module's submodules, and returns the module.

    The names stay known if wrappers are added to the submodules later.
    """
    for name, part in whole.named_modules():
        _unsharded[part] = ".".join(step for step in name.split(".") if step not in WRAPPERS)
    return whole


def own_names(module: nn.Module) -> Callable[[str], str]:
    """Returns a function that converts a name in a parallel module to the name in the unsharded module.

    A name that leads to a submodule of the unsharded module, with any wrappers around it, becomes the submodule's name
    in the unsharded module.  From any other name the steps from a wrapper to the wrapped module are removed:
    'module.layers.1.weight' in DistributedDataParallel becomes 'layers.1.weight'.  At the root, a step 'module' is
    removed for any class.
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
    own_name = own_names(module)
    return {own_name(name): tensor for name, tensor in named}


def _innermost(part: nn.Module) -> nn.Module:
    inner = next((each for step, each in part._modules.items() if each and _is_held(part, step)), None)
    return _innermost(inner) if inner else part


def _is_held(part: nn.Module, step: str, *, is_root: bool = False) -> bool:
    if step in WRAPPERS:
        return True
    is_holder = any(base.__name__ in HOLDERS for base in type(part).__mro__)
    return step == "module" and part not in _unsharded and (is_root or is_holder)
