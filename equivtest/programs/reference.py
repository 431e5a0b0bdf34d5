"""Inspects the outputs, parameters and buffers of an unsharded module, with their shapes, before any judgement."""

from __future__ import annotations

import contextlib
import functools
import pickle
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from equivtest.base.importing import load_named, require_arguments
from equivtest.cases.case import Shape, require
from equivtest.errors import Misuse, NotSupported, ReferenceRefuses
from equivtest.programs.inputs import REAL, make_whole_numbers
from equivtest.programs.mistakes import place_of, way_out_of
from equivtest.programs.names import remember_names
from equivtest.programs.outputs import OUTPUT, named_outputs
from equivtest.tensors import DTYPES, dtype_name

NUM_RUNS_AT_RANDOM = 10
"""Number of further runs of a forward that draws from a generator other than torch's."""


class Program(NamedTuple):
    """An unsharded module and its inputs.

    Attributes:
        inputs: (name, kind, shape) of each input. The shapes have only numbers.
        dtype: Name of the dtype in which the module runs.
        is_short: True if the property names no inputs, so that x is the only input.
    """

    build: str
    inputs: tuple[tuple[str, str, Shape], ...]
    positional: tuple[str, ...]
    outputs: tuple[str, ...]
    loss: str
    dtype: str
    is_short: bool

    @property
    def takes(self) -> str:
        if self.is_short:
            return f"x of shape {self.inputs[0][2]}"
        return ", ".join(f"{name} of shape {shape}" for name, _, shape in self.inputs)


class Fact(NamedTuple):
    """Shape, dtype and requires_grad of one tensor.

    Attributes:
        dtype: Name of the dtype. It is '' for the dtype of the case.
    """

    shape: Shape
    dtype: str = ""
    requires_grad: bool = True


@dataclass(frozen=True)
class Facts:
    """Name -> `Fact` of each parameter, buffer and output of a module.

    Attributes:
        parameters: Floating-point parameters. Integer parameters are not listed, and keep the values from the builder.
        buffers: Buffers that the forward changes.
        loss: The output from which backward starts, with the gradient 1. If '', backward starts from each output that
            has a gradient, with the output's cotangent.
    """

    outputs: Mapping[str, Fact]
    parameters: Mapping[str, Fact]
    buffers: Mapping[str, Fact]
    loss: str

    @property
    def roots(self) -> tuple[str, ...]:
        with_gradient = tuple(name for name, fact in self.outputs.items() if fact.requires_grad)
        return (self.loss,) if self.loss else with_gradient


@functools.lru_cache(maxsize=256)
def facts_of(program: Program) -> Facts:
    """Runs an unsharded module, and returns its outputs, parameters and buffers, with their shapes and dtypes.

    Raises:
        Misuse: the module cannot be built, does not take such inputs, or returns an output that cannot be judged.
        ReferenceRefuses: the module reports that it does not support the inputs.
    """
    first, second = (_run(program, seed) for seed in (0, 1))
    for name, fact in first.outputs.items():
        other = second.outputs.get(name)
        if other is None or other.shape != fact.shape:
            has = "none" if other is None else f"shape {other.shape}"
            raise Misuse(
                f"{program.build}, with {program.takes}: {name} has shape {fact.shape} for some values of the inputs, "
                f"and {has} for others: name the outputs to judge, such as Judge(outputs=('logits',))"
            )
    return first


def refusal_in(program: Program, dtype: str) -> str:
    try:
        facts_of(program._replace(dtype=dtype))
    except Misuse as error:
        return str(error)
    return ""


def _run(program: Program, seed: int) -> Facts:
    module = call_builder(program.build)
    parameters = _parameters(program, module)
    module = in_dtype(module, program.dtype)
    before = {name: (buffer, buffer.clone(), buffer._version) for name, buffer in module.named_buffers()}
    drawn = generator_states()
    named = _outputs(program, module, seed)
    if generator_states() != drawn:
        _require_no_chance(program, named, seed)
    _require_real(program, named)
    outputs = {name: _fact(tensor, program.dtype) for name, tensor in named.items()}
    changed = {
        name: buffer for name, buffer in module.named_buffers() if name in before and _is_changed(buffer, *before[name])
    }
    _require_real(program, {f"buffer {name}, which the forward changes,": each for name, each in changed.items()})
    buffers = {name: _fact(buffer, program.dtype) for name, buffer in changed.items()}
    return Facts(outputs, parameters, buffers, _loss_in(program, outputs))


def generator_states() -> tuple[object, bytes]:
    """Returns the states of Python's global generator and of NumPy's. The second is b'' if NumPy is not imported."""
    numpy = sys.modules.get("numpy.random")
    return random.getstate(), pickle.dumps(numpy.get_state()) if numpy else b""


def _require_no_chance(program: Program, named: Mapping[str, torch.Tensor], seed: int) -> None:
    """Raises Misuse if the outputs of further runs on the same inputs differ from `named`."""
    for _ in range(NUM_RUNS_AT_RANDOM):
        again = _outputs(program, in_dtype(call_builder(program.build), program.dtype), seed)
        for name, tensor in named.items():
            require(
                name in again and torch.equal(tensor.nan_to_num(), again[name].nan_to_num()),
                f"{program.build}, with {program.takes}: {name} differs between two runs on the same inputs, because "
                "the forward draws from Python's random or from NumPy: judge a module without it, call eval() on it, "
                "or set its probability to 0",
            )


def _outputs(program: Program, module: nn.Module, seed: int) -> dict[str, torch.Tensor]:
    source = torch.Generator().manual_seed(seed)
    try:
        with torch.random.fork_rng(devices=[]):
            outputs_of_module = call(module, program.positional, made_inputs(program, source))
    except NotSupported as error:
        raise ReferenceRefuses(
            f"{program.build}: the unsharded module, in {program.dtype}, with {program.takes},", error
        ) from error
    except (Exception, SystemExit) as error:
        short = f"an x of shape {program.inputs[0][2]}" if program.is_short else program.takes
        by_name = [name for name, _, _ in program.inputs if name not in program.positional and not program.is_short]
        way_out = f"; {way_out_of(type(error).__name__, str(error)) or 'inputs= must hold what its forward takes'}"
        if by_name and isinstance(error, TypeError):
            way_out = (
                f"; equivtest passes {by_name[0]} by name: give the input the name of the forward's argument, or list "
                "it in positional="
            )
        raise Misuse(
            f"{program.build}: the unsharded module does not take {short} in {program.dtype}: {type(error).__name__}: "
            f"{error}{way_out}"
        ) from error
    return named_outputs(outputs_of_module, program.outputs, program.build)


def made_inputs(program: Program, source: torch.Generator) -> dict[str, torch.Tensor]:
    made = {}
    for name, kind, shape in program.inputs:
        if kind == REAL:
            value = torch.randn(shape, generator=source, dtype=torch.float64)
            made[name] = value.to(DTYPES[program.dtype]).requires_grad_()
        else:
            made[name] = make_whole_numbers(kind, shape, 1, source)
    return made


def _fact(tensor: torch.Tensor, dtype: str) -> Fact:
    name = dtype_name(tensor.dtype)
    is_own = tensor.is_floating_point() and (not dtype or name == dtype)
    return Fact(tuple(tensor.shape), "" if is_own else name, tensor.requires_grad)


def _is_changed(buffer: torch.Tensor, same: torch.Tensor, values: torch.Tensor, version: int) -> bool:
    return buffer is not same or buffer._version != version or not torch.equal(buffer, values)


def _require_real(program: Program, tensors: Mapping[str, torch.Tensor]) -> None:
    for name, tensor in tensors.items():
        require(
            not tensor.is_complex(),
            f"{program.build}: {name} is of {dtype_name(tensor.dtype)}, but only tensors inside of a module may be "
            f"complex: use torch.view_as_real of {name}, or name the outputs to judge, such as "
            "Judge(outputs=('logits',))",
        )


def _parameters(program: Program, module: nn.Module) -> dict[str, Fact]:
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        is_lazy = nn.parameter.is_lazy(tensor)
        require(not is_lazy, f"{program.build}: {name} has no shape yet: run the module once in build")
    _require_real(program, {f"parameter {name}": each for name, each in module.named_parameters()})
    facts = {
        name: Fact(tuple(parameter.shape), "", parameter.requires_grad)
        for name, parameter in module.named_parameters()
        if parameter.is_floating_point()
    }
    reserved = sorted({*(name for name, _, _ in program.inputs), OUTPUT, "cotangent"} & facts.keys())
    if reserved:
        raise Misuse(
            f"{program.build}: a parameter must not be called {reserved[0]}, the name of an input or output: rename it"
        )
    return facts


def _loss_in(program: Program, outputs: Mapping[str, Fact]) -> str:
    """Returns the name of the output that is the loss, or '' if there is none.

    The loss is the output that you chose. If you chose none, it is the output called 'loss'. If there is no such
    output, it is the only output, if that output is one number and the program names its inputs.
    """
    numbers = [name for name, fact in outputs.items() if not fact.shape and fact.requires_grad]
    if program.loss:
        wanted = OUTPUT if program.loss == OUTPUT else f"{OUTPUT}.{program.loss}"
        require(
            wanted in numbers,
            f"{program.build}: loss must be an output that is one number and has a gradient, got {program.loss!r}; "
            f"such outputs are {', '.join(numbers) or 'none'}",
        )
        return wanted
    if f"{OUTPUT}.loss" in numbers:
        return f"{OUTPUT}.loss"
    return OUTPUT if OUTPUT in numbers and not program.is_short else ""


def call(module: nn.Module, positional: tuple[str, ...], inputs: Mapping[str, torch.Tensor]) -> object:
    others = {name: value for name, value in inputs.items() if name not in positional}
    given: object = module(*(inputs[name] for name in positional), **others)
    return given


def in_dtype(module: nn.Module, dtype: str) -> nn.Module:
    """Casts the module's real parameters and buffers to the named dtype. All other tensors keep their dtype.

    `nn.Module.to` would make complex buffers real and lose their imaginary part. The methods below keep complex
    buffers.

    Source: torch.nn.Module.to, float, double, half and bfloat16 (2.13.0).
    """
    casts = {"float32": module.float, "float64": module.double, "float16": module.half, "bfloat16": module.bfloat16}
    return casts[dtype]()


def call_builder(build: str) -> nn.Module:
    """Calls the function that makes the unsharded module.

    'package.module:NAME#layers.3' makes only the submodule `layers.3`. Its parameters and buffers are zeros, and no
    other submodule gets memory, except if the module has tensors that are neither parameters nor buffers.
    'package.module:NAME##bfloat16', and '...#layers.3#bfloat16', make a module that runs under autocast to that dtype.

    Raises:
        Misuse: the function does not exist, raises, or makes no module, or the module does not have the submodule.
        ReferenceRefuses: the function reports that it does not support something.
    """
    whole, autocast = build.split("#")[:2], build.split("#")[2:]
    module = _built(*whole)
    for dtype in autocast:
        forward: Any = torch.autocast("cpu", dtype=DTYPES[dtype])(module.forward)
        module.forward = forward
    return remember_names(module)


def _built(name: str, part: str = "") -> nn.Module:
    function = cast("Callable[[], object]", load_named(name, "build"))
    require_arguments(function, f"build {name!r}", ())
    if part and (alone := _alone(function, part)) is not None:
        return alone
    try:
        with seeded():  # a random buffer must be the same on every rank
            module = function()
    except NotSupported as error:
        raise ReferenceRefuses(f"build {name!r}", error) from error
    except (Exception, SystemExit) as error:
        way_out = way_out_of(type(error).__name__, str(error)) or "fix that; build runs in one process, without ranks"
        raise Misuse(f"build {name!r} raised {type(error).__name__}{place_of(error)}: {error}: {way_out}") from error
    if not isinstance(module, nn.Module):
        raise Misuse(f"build {name!r} must give an nn.Module, got {type(module).__name__}")
    try:
        return module.get_submodule(part)
    except AttributeError as error:
        raise Misuse(f"build {name!r} gives a module without {part}: {error}") from error


@contextlib.contextmanager
def seeded() -> Iterator[None]:
    """Makes random draws within the block the same each time.

    After the block the CPU's generator has the same state as before.

    The function does not call torch.manual_seed, which records its call stack once for each missing kind of device.
    Recording the call stacks takes longer than making a small module.  Source: _lazy_call of torch/cuda/__init__.py
    (2.13.0).
    """
    with torch.random.fork_rng(devices=[]):
        if torch.accelerator.is_available():
            torch.manual_seed(0)
        else:
            torch.default_generator.manual_seed(0)
        yield


def _alone(function: Callable[[], object], part: str) -> nn.Module | None:
    """Makes the submodule without allocating other submodules. The result is None if that is impossible."""
    try:
        with torch.random.fork_rng(devices=[]), torch.device("meta"):
            module = cast("nn.Module", function()).get_submodule(part)
    except Exception:  # an arbitrary function may read values
        return None
    attributes = [each for owner in module.modules() for each in vars(owner).values()]
    if any(isinstance(each, torch.Tensor) for each in attributes):
        return None
    module.to_empty(device="cpu")
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            tensor.zero_()
    return module


def with_parameters(module: nn.Module, given: Mapping[str, torch.Tensor]) -> nn.Module:
    """Replaces the module's parameters by the tensors in `given`. Frozen and tied parameters stay frozen and tied."""
    names = dict(module.named_parameters())
    made = {
        id(names[name]): nn.Parameter(tensor, requires_grad=names[name].requires_grad) for name, tensor in given.items()
    }
    for name, parameter in list(module.named_parameters(remove_duplicate=False)):
        if id(parameter) in made:
            owner, _, last = name.rpartition(".")
            setattr(module.get_submodule(owner), last, made[id(parameter)])
    return module
