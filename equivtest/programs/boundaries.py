"""Records the inputs and outputs of each submodule of a module, and the gradients of these tensors.

The code calls a submodule a part. Within a part this module also records the operands and the result of each attention
and of each grouped matrix product. For each call of topk it records the operand and the chosen indices.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten
from torch.utils.hooks import RemovableHandle

from equivtest.programs.names import own_names
from equivtest.programs.reference import Fact, Program, call, call_builder, facts_of, in_dtype, made_inputs
from equivtest.tensors import dtype_name

BOUNDARY, INPUT, OUTPUT, CHOSEN = "boundary.", ":input", ":output", ":chosen"


class Function(NamedTuple):
    """A function of torch.  If a part calls it, its operands and its result (or its choice) are recorded.

    Attributes:
        name: Suffix of the names under which its operands and result are recorded.
        operands: Names of the function's parameters whose arguments are recorded.
        chooses: True if the result consists of chosen elements of the operand, as in topk. Then the indices of these
            elements are recorded instead of the result.
    """

    name: str
    operands: tuple[str, ...]
    chooses: bool = False


TOPK = Function(":topk", ("input",), chooses=True)
FUNCTIONS: dict[Callable[..., Any], Function] = {
    functional.scaled_dot_product_attention: Function(":attention", ("query", "key", "value")),
    torch.topk: TOPK,
    torch.Tensor.topk: TOPK,
    torch._grouped_mm: Function(":grouped", ("self",)),
}


Choice = Callable[[torch.Tensor], Any]
"""Function that repeats a call of `torch.topk` on another operand."""


def is_boundary(name: str) -> bool:
    return name.removeprefix("grad.").startswith(BOUNDARY)


def is_operand(name: str) -> bool:
    return is_boundary(name) and any(function.name in name for function in FUNCTIONS.values())


def parts_of(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yields each submodule except the root once, with its name in the unsharded module.

    If a submodule is within wrappers, the outermost wrapper is yielded instead of the submodule.
    """
    own_name, seen = own_names(module), {""}
    for name, part in module.named_modules():
        if (own := own_name(name)) not in seen:
            seen.add(own)
            yield own, part


def tensors_of(path: str, number: int, given: object, what: str = "") -> list[tuple[str, torch.Tensor]]:
    """Lists (name, tensor) for each floating-point tensor in `given`, the inputs or outputs of one call of a submodule.

    The name is `path` with `what` behind it, such as 'layers.1', or 'layers.1:input' if `what` is INPUT. In the second
    call of the submodule the name is 'layers.1#2'. If `given` has several leaves, the first is 'layers.1[0]'.
    """
    leaves = tree_leaves(given)
    call = (f"{path}#{number + 1}" if number else path) + what
    return [
        (call if len(leaves) == 1 else f"{call}[{place}]", leaf)
        for place, leaf in enumerate(leaves)
        if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()
    ]


class Known(NamedTuple):
    """A recorded tensor, with the names of its value and of its gradient.

    Attributes:
        reference: Function that returns the tensor, or None after its memory was released.
        value: Name of the tensor's value.
        gradient: Name of the gradient, summed over all uses of the tensor. It is '' if each part that takes the tensor
            has a separate gradient with another name.
        is_owed: True if a part returned or took the tensor, so that a parallel module must have the tensor too. False
            if only a function returned or took the tensor.
    """

    reference: Callable[[], torch.Tensor | None]
    value: str
    gradient: str
    is_owed: bool


class Boundaries(TorchFunctionMode):
    """Passes each input and output of each submodule ('part') to `meet` and `meet_gradient`, which subclasses define.

    If one part returns a tensor and another takes it, the tensor is recorded once, as the first part's output. An input
    that no operation computed, such as an input of the module itself, is not recorded. The class is also a torch
    function mode, so that it can record the operands of `FUNCTIONS` within the part that calls the function.

    If a part takes a tensor that no part returned, the part gets a view of the tensor. The view's gradient comes from
    this part alone, not from other users of the tensor. This agrees with parallel parts that wrap their input, as
    SequenceParallel wraps a plain tensor as a DTensor. The gradient of the wrapped input comes from that part alone,
    too.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._calls: tuple[Counter[str], Counter[str]] = (Counter(), Counter())
        self._running: list[str] = []  # parts that run now, the innermost last
        self._known: dict[int, Known] = {}  # by id
        self._hooks: list[RemovableHandle] = []
        for path, part in parts_of(module):
            before, after = functools.partial(self._before, path), functools.partial(self._after, path)
            self._hooks.append(part.register_forward_pre_hook(before, with_kwargs=True))
            self._hooks.append(part.register_forward_hook(after, with_kwargs=True))

    def __exit__(self, *raised: object) -> None:
        super().__exit__(*raised)  # type: ignore[no-untyped-call]
        self.remove()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if (function := FUNCTIONS.get(func)) and self._running and not torch.compiler.is_compiling():
            places = dict(zip(function.operands, args, strict=False))
            own = {name: self.apart(each) for name, each in {**places, **kwargs}.items() if name in function.operands}
            operands = [own[name] for name in function.operands]
            args = (*(own[name] for name in places), *args[len(places) :])
            kwargs = {name: own.get(name, each) for name, each in kwargs.items()}
            path, calls = self._running[-1], self._calls[self.is_again]
            number = calls[path + function.name]
            calls[path + function.name] += 1
            self._meet_all(path, number, operands, function.name)
            for name, operand in tensors_of(path, number, operands, function.name) if function.chooses else ():
                others = {name: each for name, each in kwargs.items() if name not in function.operands}
                dim = int(kwargs.get("dim", args[2] if len(args) > 2 else -1))
                choice: Choice = lambda given: func(given, *args[1:], **others)  # noqa: B023, E731  (called at once)
                return self.choose(name + CHOSEN, operand, dim, choice)
            given = func(*args, **kwargs)
            self._meet_all(path, number, given, function.name + OUTPUT)
            return given
        return func(*args, **kwargs)

    def begin_again(self) -> None:
        self._calls = Counter(), Counter()
        self._running.clear()
        self._known.clear()

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._known.clear()

    def meet(self, name: str, tensor: torch.Tensor) -> None:
        """Receives each recorded tensor, with the name of its value."""
        raise NotImplementedError

    def meet_gradient(self, name: str, tensor: torch.Tensor) -> None:
        """Receives each recorded tensor that requires a gradient, with the name of the gradient."""
        raise NotImplementedError

    def owe_nothing(self, name: str) -> None:
        """Does nothing. A subclass may record that the tensor `name` need not exist in a parallel module.

        This method is called for each operand and result of one of `FUNCTIONS` that no part takes or returns.
        """

    def refer_to(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor | None]:
        """Returns a function that returns the tensor, and keeps it alive so that no other tensor gets its id."""
        return lambda: tensor

    def is_given(self, tensor: torch.Tensor, what: str) -> bool:
        """True if a tensor counts as an input of the module, so that it is not recorded: see `is_given` below."""
        return is_given(tensor, what)

    def apart(self, operand: Any) -> Any:
        """Returns the tensor to pass to one of `FUNCTIONS` in place of `operand`. A subclass may return a copy."""
        return operand

    def is_apart(self, name: str, tensor: torch.Tensor) -> bool:
        """True if a part that returns its input `tensor` unchanged must return a copy, as the output `name`."""
        return False

    def choose(self, name: str, operand: torch.Tensor, dim: int, choice: Choice) -> Any:
        """Returns the values and indices that topk chose along a dim. A subclass may record or replace the choice."""
        return choice(operand)

    @property
    def is_again(self) -> bool:
        return is_in_backward()

    def _before(self, path: str, part: nn.Module, args: object, kwargs: object) -> Any:
        leaves, how = tree_flatten((args, kwargs))
        views = self._take_all(path, self._calls[self.is_again][path], leaves)
        self._running.append(path)
        return tree_unflatten([views.get(id(leaf), leaf) for leaf in leaves], how) if views else None

    def _after(self, path: str, part: nn.Module, args: object, kwargs: object, given: object) -> object:
        calls = self._calls[self.is_again]
        calls[path] += 1
        if path in self._running:  # else checkpointing stopped it early
            del self._running[self._running.index(path) :]
        number, handed = calls[path] - 1, {id(each) for each in tree_leaves((args, kwargs))}
        same = [(name, each) for name, each in tensors_of(path, number, given) if id(each) in handed]
        apart = {id(each) for name, each in same if self.is_apart(name, each)}
        own = copied_of(given, apart) if apart else given
        self._meet_all(path, number, own, "")
        return own if apart else None

    def _take_all(self, path: str, number: int, leaves: list[Any]) -> dict[int, torch.Tensor]:
        """Records the inputs of a part. Returns id of an input -> the view that is passed to the part in its place.

        If a part takes a tensor at several places of one call, the part gets the tensor itself and not a view. Some
        modules, such as nn.MultiheadAttention (torch 2.13.0), check if two inputs are the same tensor, and a parallel
        module may wrap each place.
        """
        views: dict[int, torch.Tensor] = {}
        num_places = Counter(map(id, leaves))
        for name, tensor in tensors_of(path, number, leaves, INPUT):
            known = self._known_as(tensor)
            if known is None or not known.is_owed:
                if self.is_given(tensor, INPUT):
                    continue
                known = Known(self.refer_to(tensor), name, "", is_owed=True)
            self._see(path, tensor, known)
            if not known.gradient and num_places[id(tensor)] == 1 and torch.is_grad_enabled():
                views[id(tensor)] = view = view_of(tensor)
                self._known[id(view)] = Known(self.refer_to(view), known.value, "", is_owed=True)
                self._see(path, view, self._known[id(view)]._replace(gradient=name))
        return views

    def _meet_all(self, path: str, number: int, given: object, what: str) -> None:
        for name, tensor in tensors_of(path, number, given, what):
            known = self._known_as(tensor)
            if known is None or (not what and not known.is_owed):
                if self.is_given(tensor, what):
                    continue
                known = Known(self.refer_to(tensor), name, name, is_owed=not what)
            self._see(path, tensor, known if known.gradient else known._replace(gradient=name))

    def _known_as(self, tensor: torch.Tensor) -> Known | None:
        known = self._known.get(id(tensor))
        return known if known is not None and known.reference() is tensor else None

    def _see(self, path: str, tensor: torch.Tensor, known: Known) -> None:
        before, self._known[id(tensor)] = self._known_as(tensor), known
        if not known.is_owed:
            self.owe_nothing(known.value)
        if before is None or before.value != known.value:
            self.meet(known.value, tensor)
        if known.gradient and tensor.requires_grad and (before is None or before.gradient != known.gradient):
            self.meet_gradient(known.gradient, tensor)


def view_of(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a view of the whole tensor, whose gradient autograd keeps apart from other uses of the tensor.

    If a part writes to the view, the part writes to the tensor, and autograd records this. A copy or detach() would
    lose the write or its gradient. The view comes from transpose, which needs no sizes. Tensor.view_as refuses uneven
    shards of a DTensor (torch 2.13.0).
    """
    return tensor.transpose(0, 0)


def copied_of(given: object, chosen: Collection[int]) -> object:
    """Returns `given`, the output of an unsharded part, with copies of the tensors whose ids are in `chosen`."""
    with torch.enable_grad():  # a copy requires a gradient if the tensor does
        return tree_map_only(torch.Tensor, lambda each: each.clone() if id(each) in chosen else each, given)


def is_in_backward() -> bool:
    """True while a backward runs. A forward that starts in a backward is a recomputation by checkpointing."""
    return torch._C._current_graph_task_id() != -1


def is_given(tensor: torch.Tensor, what: str) -> bool:
    """True if a tensor counts as an input of the module, because no operation of autograd computed the tensor.

    An output or operand (`what` is not INPUT) that requires no gradient never counts as an input of the module. The
    module may have computed the tensor and then detached it. For example, topk needs only the values of its operand.
    """
    return tensor.grad_fn is None and (what == INPUT or tensor.requires_grad)


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """Copies a tensor after any pending collective on it has ended."""
    return tensor.detach().clone()


def answers_of(values: Mapping[str, Any], gradients: Mapping[str, Any]) -> dict[str, Any]:
    """Merges values and gradients in one dict."""
    found = {f"{BOUNDARY}{name}": value for name, value in values.items()}
    return found | {f"grad.{BOUNDARY}{name}": gradient for name, gradient in gradients.items()}


class Capture(Boundaries):
    """Keeps the inputs, outputs and gradients of all submodules during one forward and backward.

    Tensors that checkpointing recomputes in the backward are not kept.

    Attributes:
        values: Name of a tensor -> result of `keep` for the tensor.
        gradients: Name of a gradient -> result of `keep` for the gradient.

    Args:
        keep: Function (tensor) -> the object that is kept. By default this object is a copy of the tensor.
    """

    def __init__(self, module: nn.Module, keep: Callable[[torch.Tensor], Any] = copied) -> None:
        super().__init__(module)
        self.values: dict[str, Any] = {}
        self.gradients: dict[str, Any] = {}
        self._keep = keep

    def meet(self, name: str, tensor: torch.Tensor) -> None:
        if not self.is_again:
            self.values[name] = self._keep(tensor)

    def meet_gradient(self, name: str, tensor: torch.Tensor) -> None:
        if not self.is_again:
            tensor.register_hook(functools.partial(self._came_back, self.gradients, name))  # type: ignore[no-untyped-call]

    def choose(self, name: str, operand: torch.Tensor, dim: int, choice: Choice) -> Any:
        found = choice(operand)
        if not self.is_again:
            self.values[name] = self._keep(found[1])
        return found

    def named(self) -> dict[str, Any]:
        return answers_of(self.values, self.gradients)

    def _came_back(self, gradients: dict[str, Any], name: str, gradient: torch.Tensor) -> None:
        gradients[name] = self._keep(gradient)


class Facts(Capture):
    """Keeps a `Fact` for each input and output of each submodule, and for the gradient of each such tensor."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(
            module, lambda tensor: Fact(tuple(tensor.shape), dtype_name(tensor.dtype), tensor.requires_grad)
        )

    def meet_gradient(self, name: str, tensor: torch.Tensor) -> None:
        self.gradients[name] = self._keep(tensor)

    def is_apart(self, name: str, tensor: torch.Tensor) -> bool:
        return True


@functools.lru_cache(maxsize=256)
def boundaries_of(program: Program) -> Mapping[str, Fact]:
    """Returns name -> shape and dtype, for all inputs, outputs and gradients of an unsharded module's submodules.

    Raises:
        Misuse: the module cannot be built, does not take such inputs, or returns an output that cannot be judged.
    """
    facts_of(program)  # raises if the module does not fit
    module = in_dtype(call_builder(program.build), program.dtype)
    capture = Facts(module)
    with torch.random.fork_rng(devices=[]), capture:
        call(module, program.positional, made_inputs(program, torch.Generator().manual_seed(0)))
        return capture.named()
