"""What goes in and out of a module's parts: the tensors that each submodule gives, and the gradients that come back."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from equivtest.families.module.case_facts import Fact, Program, call, call_builder, facts_of, made_inputs
from equivtest.tensors import DTYPES, dtype_name

BOUNDARY, INPUT = "boundary.", ":input"

WRAPPERS = ("_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod")
"""What holds a module within torch's wrappers.

Source: torch.distributed.fsdp, torch.distributed.algorithms._checkpoint.checkpoint_wrapper, torch._dynamo.eval_frame
(2.13.0); DistributedDataParallel calls it 'module', at the root alone.
"""


def is_boundary(name: str) -> bool:
    """Whether an answer is what a part gave, or the gradient that came back to it."""
    return name.removeprefix("grad.").startswith(BOUNDARY)


def own_name(name: str) -> str:
    """Of a submodule, a parameter or a buffer of a parallel module: without what wrappers call the module they hold."""
    parts = [part for part in name.split(".") if part not in WRAPPERS]
    return ".".join(parts[1:] if parts[:1] == ["module"] else parts)


def parts_of(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The submodules by the names of the unsharded module, each once, the outermost of wrappers; not the whole."""
    seen = {""}
    for name, part in module.named_modules():
        if (own := own_name(name)) not in seen:
            seen.add(own)
            yield own, part


def tensors_of(path: str, number: int, given: object, what: str = "") -> list[tuple[str, torch.Tensor]]:
    """The floating-point tensors of what a part gave, or was handed, in its `number`-th call, from 0, by name.

    'layers.1', and 'layers.1#2' when it was called before; 'layers.1[0]' where there are several leaves; of what it was
    handed 'layers.1:input'.
    """
    leaves = tree_leaves(given)
    call = (f"{path}#{number + 1}" if number else path) + what
    return [
        (call if len(leaves) == 1 else f"{call}[{place}]", leaf)
        for place, leaf in enumerate(leaves)
        if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()
    ]


class Boundaries:
    """Meets what goes into every part of a module and comes out of it, once: of what is handed on, when it came out.

    What nothing computed, as the inputs of the module itself, is not met where it goes in.
    """

    def __init__(self, module: nn.Module) -> None:
        self._calls: tuple[Counter[str], Counter[str]] = (Counter(), Counter())
        self._met: dict[int, torch.Tensor] = {}  # held, so that no other gets its id
        self._hooks: list[RemovableHandle] = []
        for path, part in parts_of(module):
            before, after = functools.partial(self._before, path), functools.partial(self._after, path)
            self._hooks.append(part.register_forward_pre_hook(before, with_kwargs=True))
            self._hooks.append(part.register_forward_hook(after))

    def remove(self) -> None:
        """Has the module run as before, and lets go of what was met, whose hooks hold this in turn."""
        for hook in self._hooks:
            hook.remove()
        self._met.clear()

    def meet(self, name: str, tensor: torch.Tensor) -> None:
        """Does what is to be done with a tensor."""
        raise NotImplementedError

    @property
    def is_again(self) -> bool:
        """Whether checkpointing computes it once more, in the backward."""
        return torch._C._current_graph_task_id() != -1

    def _before(self, path: str, part: nn.Module, args: object, kwargs: object) -> None:
        self._meet_all(path, self._calls[self.is_again][path], (args, kwargs), INPUT)

    def _after(self, path: str, part: nn.Module, args: object, given: object) -> None:
        calls = self._calls[self.is_again]
        calls[path] += 1
        self._meet_all(path, calls[path] - 1, given, "")

    def _meet_all(self, path: str, number: int, given: object, what: str) -> None:
        for name, tensor in tensors_of(path, number, given, what):
            if id(tensor) not in self._met and not (what == INPUT and tensor.grad_fn is None):
                self._met[id(tensor)] = tensor
                self.meet(name, tensor)


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """What was on its way has come, and what is written to the tensor later leaves the copy as it is."""
    return tensor.detach().clone()


class Capture(Boundaries):
    """Keeps what goes in and comes out, and the gradients that come back, in one forward and backward.

    What checkpointing computes once more in the backward is not kept again.

    Attributes:
        values, gradients: By name, what `keep` made of them.
    """

    def __init__(self, module: nn.Module, keep: Callable[[torch.Tensor], Any] = copied) -> None:
        super().__init__(module)
        self.values: dict[str, Any] = {}
        self.gradients: dict[str, Any] = {}
        self._keep = keep

    def meet(self, name: str, tensor: torch.Tensor) -> None:
        if not self.is_again:
            self.values[name] = self._keep(tensor)
            if tensor.requires_grad:
                tensor.register_hook(functools.partial(self._came_back, name))  # type: ignore[no-untyped-call]

    def named(self) -> dict[str, Any]:
        """All that is kept, by the names of answers."""
        values = {f"{BOUNDARY}{name}": value for name, value in self.values.items()}
        return values | {f"grad.{BOUNDARY}{name}": gradient for name, gradient in self.gradients.items()}

    def _came_back(self, name: str, gradient: torch.Tensor) -> None:
        self.gradients[name] = self._keep(gradient)


@functools.lru_cache(maxsize=256)
def boundaries_of(program: Program) -> Mapping[str, Fact]:
    """What the parts of an unsharded module give, by name, in the order in which they do.

    Raises:
        Misuse: as of `facts_of`.
    """
    facts_of(program)  # which says what does not fit
    module = call_builder(program.build).to(DTYPES[program.dtype])
    capture = Capture(module, lambda tensor: Fact(tuple(tensor.shape), dtype_name(tensor.dtype), tensor.requires_grad))
    with torch.random.fork_rng(devices=[]):
        call(module, program.positional, made_inputs(program, torch.Generator().manual_seed(0)))
    capture.remove()
    return capture.values
