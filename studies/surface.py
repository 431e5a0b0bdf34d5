"""Maps the public names of torch's parallel modules to the judged programs that call them.

python -m studies.surface [--profile smoke] [--write]

Runs the shipped properties and notes in every rank which of torch's public names a judged program calls.  A green run
shows nothing about a name that no judged program calls.  `--write` replaces docs/reference/surface.md.

A name counts as called if Python enters its code, or a method of its class, while a rank runs a case.  One call judges
one use: options that no property passes stay unjudged.
"""

from __future__ import annotations

import argparse
import enum
import importlib
import inspect
import os
import subprocess
import sys
import tempfile
import types
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from packaging.version import Version

AREAS = {
    "collectives": (
        "torch.distributed",
        "torch.distributed.nn.functional",
        "torch.distributed._functional_collectives",
    ),
    "DTensor": (
        "torch.distributed.device_mesh",
        "torch.distributed.tensor",
        "torch.distributed.tensor.parallel",
        "torch.distributed.tensor.experimental",
        "torch.distributed.tensor.debug",
    ),
    "data parallelism": (
        "torch.distributed.fsdp",
        "torch.nn.parallel",
        "torch.distributed.algorithms",
        "torch.distributed.algorithms.ddp_comm_hooks",
        "torch.distributed.algorithms.ddp_comm_hooks.default_hooks",
        "torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook",
        "torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook",
        "torch.distributed.algorithms.ddp_comm_hooks.quantization_hooks",
        "torch.distributed.algorithms.model_averaging.averagers",
        "torch.distributed.algorithms.model_averaging.hierarchical_model_averager",
    ),
    "pipelines": ("torch.distributed.pipelining",),
    "checkpoints": (
        "torch.distributed.checkpoint",
        "torch.distributed.checkpoint.state_dict",
        "torch.utils.checkpoint",
    ),
    "optimizers": (
        "torch.distributed.optim",
        "torch.optim",
        "torch.optim.lr_scheduler",
        "torch.optim.swa_utils",
        "torch.amp",
    ),
    "utilities of modules": (
        "torch.nn.utils",
        "torch.nn.utils.parametrizations",
        "torch.nn.utils.parametrize",
        "torch.nn.utils.stateless",
        "torch.nn.utils.rnn",
    ),
    "attention": ("torch.nn.attention", "torch.nn.attention.flex_attention"),
    "functions": ("torch.nn.functional",),
    "modules": ("torch.nn",),
}
"""Name of an area -> modules of torch whose public names it has.  A name in several modules counts in the first."""

NO_NUMBERS = {
    "asks for or sets a state of the process": (
        "torch.distributed.get_*",
        "torch.distributed.is_*",
        "torch.distributed.set_*",
        "torch.distributed.supports_complex",
        "torch.distributed.breakpoint",
        "torch.distributed.record_comm",
        "torch.distributed.tensor.debug.*",
        "torch.amp.is_autocast_available",
        "*.assert_int_or_pair",
        "*.has_torch_function*",
        "*.boolean_dispatch",
    ),
    "makes groups or connects processes": (
        "torch.distributed.*Store",
        "torch.distributed.*rendezvous*",
        "torch.distributed.destroy_process_group",
        "torch.distributed.init_process_group",
    ),
    "holds options of a call": (
        "torch.distributed.*Options",
        "torch.distributed.*Config",
        "torch.distributed.BackendConfig",
        "torch.distributed.BuiltinCommHookType",
        "torch.distributed.DebugLevel",
        "torch.distributed.GroupMember",
        "torch.distributed.Logger",
        "torch.distributed.ReduceOp",
        "torch.distributed.group",
    ),
    "sends pickled objects, no tensors": ("torch.distributed.*_object*",),
}
"""Reason -> patterns of names that compute no tensor, so that no property can judge them."""

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "surface.md"
FOLDER = "EQUIVTEST_SURFACE"
"""Environment variable with the folder into which ranks write the names that they call."""

Calls = dict[str, set[str]]
"""Public name of torch -> programs that call it."""


def public_names() -> dict[str, dict[str, Any]]:
    """Returns area -> qualified name -> object, for every function and class that can compute something."""
    areas: dict[str, dict[str, Any]] = {area: {} for area in AREAS}
    seen: set[int] = set()
    with warnings.catch_warnings(action="ignore"):  # of deprecated names
        for area, module in ((area, module) for area, modules in AREAS.items() for module in modules):
            for name, value in _public(importlib.import_module(module)):
                if id(value) not in seen:
                    seen.add(id(value))
                    areas[area][f"{module}.{name}"] = value
    return areas


def _public(module: types.ModuleType) -> Iterator[tuple[str, Any]]:
    """Yields (name, value) of a module's public names.

    These are the names in `__all__`.  Without `__all__` they are built-ins, and what the module or a module below it
    defines.
    """
    listed = getattr(module, "__all__", None)
    for name in sorted(listed if listed is not None else vars(module)):
        value = getattr(module, name, None)
        is_listed = listed is not None or _is_defined_in(module, name, value)
        if not name.startswith("_") and _computes(value) and is_listed:
            yield name, value


def _is_defined_in(module: types.ModuleType, name: str, value: Any) -> bool:
    home = str(getattr(value, "__module__", None) or "torch._C")
    registered = name.endswith(("_backward", "_setup_context"))
    return home.startswith((module.__name__, "torch._C", "torch._jit_internal")) and not registered


def _computes(value: Any) -> bool:
    """True for functions and classes, except exceptions, enumerations, and names for type checkers."""
    if inspect.isclass(value):
        return not issubclass(value, (BaseException, enum.Enum)) and not getattr(value, "_is_protocol", False)
    return callable(value) and getattr(type(value), "__module__", "") not in ("typing", "typing_extensions")


class Tracer:
    """Records which public names the code of one rank calls.

    The folder gets one line `name, program` at the first call of a name by a program.
    """

    def __init__(self, folder: Path) -> None:
        self._file = folder / f"{os.getpid()}.txt"
        self._codes, self._builtins = names_by_code(public_names())
        self._seen: set[tuple[str, str]] = set()
        self._program = ""

    def run(self, program: str, function: Callable[[], Any]) -> Any:
        self._program = program
        sys.setprofile(self._note)
        try:
            return function()
        finally:
            sys.setprofile(None)

    def _note(self, frame: types.FrameType, event: str, called: Any) -> None:
        if event == "call":
            names = self._codes.get(frame.f_code, ())
        elif event == "c_call":
            names = self._builtins.get(id(called), ())
        else:
            return
        for name in names:
            if (name, self._program) not in self._seen:
                self._seen.add((name, self._program))
                with self._file.open("a", encoding="utf-8") as lines:
                    lines.write(f"{name} {self._program}\n")


def names_by_code(
    areas: Mapping[str, Mapping[str, Any]],
) -> tuple[dict[types.CodeType, list[str]], dict[int, list[str]]]:
    """Returns code object -> its public names, and id of a built-in function -> its public names."""
    codes: dict[types.CodeType, list[str]] = defaultdict(list)
    builtins: dict[int, list[str]] = defaultdict(list)
    for names in areas.values():
        for name, value in names.items():
            for function in _functions(value):
                if code := getattr(function, "__code__", None):
                    codes[code].append(name)
                else:
                    builtins[id(function)].append(name)
    return _of_one_name(codes), _of_one_name(builtins)


def _of_one_name(names: Mapping[Any, list[str]]) -> dict[Any, list[str]]:
    """Removes code that several names share, such as the `__init__` of dataclasses: its call shows none of them."""
    return {key: shared for key, shared in names.items() if len(set(shared)) == 1}


def _functions(value: Any) -> Iterable[Any]:
    """Returns the functions whose call counts as a call of `value`.  For a class these are its methods."""
    if not inspect.isclass(value):
        return _unwrapped(value)
    methods = (getattr(method, "__func__", method) for method in vars(value).values())
    return [inner for method in methods if inspect.isroutine(method) for inner in _unwrapped(method)]


def _unwrapped(function: Any) -> list[Any]:
    """Returns the function below its decorators.

    If torch dispatches the function by a flag, this is the branch without the flag.  Source:
    torch._jit_internal.boolean_dispatch (2.13.0).
    """
    function = inspect.unwrap(function)
    if getattr(function, "__qualname__", "").startswith("boolean_dispatch."):
        return [inspect.getclosurevars(function).nonlocals["if_false"]]
    return [function]


def trace_ranks(folder: Path) -> None:
    """Makes every rank that this process forks record the names that its cases call."""
    from equivtest.ranks import rank

    tracer: list[Tracer] = []
    visit = rank.Rank.work

    def work(self: rank.Rank, task: Any) -> Any:
        if not isinstance(task, rank.Visit):
            return visit(self, task)
        if not tracer:
            tracer.append(Tracer(folder))
        return tracer[0].run(_program_of(task), lambda: visit(self, task))

    rank.Rank.work = work  # type: ignore[method-assign]


def _program_of(task: Any) -> str:
    """Returns the name of the subject, or for a program the name of its parallel function or step."""
    functions = (task.case.get("parallelize"), task.case.get("step"), task.case.get("build"))
    named = next((name for name in functions if isinstance(name, str) and ":" in name), task.subject)
    return str(named).rpartition(":")[2]


def calls_of(profile: str) -> Calls:
    """Runs the shipped properties in a profile.  Returns the public names that they call, each with its programs."""
    with tempfile.TemporaryDirectory() as folder:
        options = ["--profile", profile, "--import", "studies.surface", "--audit", "off"]
        command = [sys.executable, "-m", "equivtest.cli", "run", *options]
        subprocess.run(command, env=os.environ | {FOLDER: folder}, check=False, stdout=subprocess.DEVNULL)
        calls: Calls = defaultdict(set)
        for file in Path(folder).iterdir():
            for line in file.read_text(encoding="utf-8").splitlines():
                name, program = line.split(" ")
                calls[name].add(program)
    return calls


def reason_of(name: str) -> str:
    matches = (reason for reason, patterns in NO_NUMBERS.items() if any(fnmatchcase(name, each) for each in patterns))
    return next(matches, "")


def page(calls: Calls) -> Iterator[str]:
    areas = public_names()
    yield from (
        "# Torch's parallel surface",
        "",
        f"This map lists the {sum(map(len, areas.values()))} public functions and classes of torch",
        f"{Version(torch.__version__).public} that a parallel program may use, and the judged programs of the shipped",
        "properties that call them. A green run shows nothing about a name that no program calls, and nothing about",
        "options that no program passes. [Operators of DTensors](operators.md) has its own list.",
        "",
        "`python -m studies.surface --write` makes this page. A test fails if the installed torch has a name that the",
        "page lacks.",
        "",
        "| area | names | called by a judged program | compute no tensor | nothing yet |",
        "|---|---|---|---|---|",
    )
    for area, names in areas.items():
        kinds = Counter("called" if name in calls else "none" if reason_of(name) else "open" for name in names)
        yield f"| {area} | {len(names)} | {kinds['called']} | {kinds['none']} | {kinds['open']} |"
    for area, names in areas.items():
        yield from ("", f"## {area[0].upper()}{area[1:]}", "", "| name | called by |", "|---|---|")
        for name in sorted(names):
            yield f"| `{name}` | {_programs(sorted(calls.get(name, ()))) or reason_of(name) or 'nothing yet'} |"


def _programs(programs: list[str]) -> str:
    rest = f" and {len(programs) - 3} more" if len(programs) > 3 else ""
    return ", ".join(f"`{program}`" for program in programs[:3]) + rest


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--profile", default="smoke")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    text = "\n".join(page(calls_of(options.profile))) + "\n"
    if options.write:
        PAGE.parent.mkdir(exist_ok=True)
        PAGE.write_text(text, encoding="utf-8")
    print(text if not options.write else text.partition("\n## ")[0])


if os.environ.get(FOLDER):
    trace_ranks(Path(os.environ[FOLDER]))

if __name__ == "__main__":
    main()
