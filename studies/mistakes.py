"""Prints the message of each of fifteen mistakes of a newcomer: `python -m studies.mistakes`.

The exit code is 1 if a message has more than five lines, shows a traceback, or names no way out.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import equivtest
from tests.programs import mistakes

MOST_LINES = 5
SHAPES = [(1, 3), (4, 3)]
Y = {"y": equivtest.real((2, 3))}
HCCL = equivtest.Backend("hccl", "npu")
SGD = equivtest.Training(optimizer=mistakes.sgd)


@dataclass(frozen=True)
class Mistake:
    """One mistake in a call of `equivtest.check`.

    Attributes:
        way_out: What the message must say.
        build, parallelize: Functions of tests/programs/mistakes.py.
        changes: Arguments that are wrong, or that the mistake needs.
    """

    name: str
    way_out: str
    build: Callable[..., Any] = mistakes.block
    parallelize: Callable[..., Any] = mistakes.tensor_parallel
    changes: Mapping[str, Any] = field(default_factory=dict)

    def message(self) -> str:
        arguments: dict[str, Any] = {"inputs": SHAPES, "world_sizes": (2,), "dtypes": ("float32",), "audit": False}
        try:
            equivtest.check(self.build, self.parallelize, raises=True, **arguments | dict(self.changes))
        except equivtest.EquivtestError as error:
            return str(error)
        return ""


def inner() -> Callable[..., Any]:
    def block() -> Any:
        return mistakes.block()

    return block


MISTAKES = (
    Mistake("wrong shape", "inputs=", changes={"inputs": [(1, 5), (4, 5)]}),
    Mistake("wrong name of an argument", "did you mean", changes={"input": SHAPES}),
    Mistake(
        "wrong name of an input",
        "give the input the name of the forward's argument",
        build=mistakes.InPlace,
        changes={"inputs": {"y": equivtest.real((2, 3))}},
    ),
    Mistake("lambda", "write `def build(...)` in a file", build=lambda: mistakes.block()),
    Mistake("function within a function", "move it to the top level", build=inner()),
    Mistake("missing import", "install that package", build=mistakes.without_package),
    Mistake("device that is not there", "mesh.device_type", build=mistakes.without_device),
    Mistake(
        "backend that is not there", "import a vendor's module", changes={"backend": equivtest.Backend("nccl", "cuda")}
    ),
    Mistake("plan that names nothing", "plan", parallelize=mistakes.plan_of_nothing),
    Mistake("parallelize without return", "return", parallelize=mistakes.without_return),
    Mistake("odd heads", "raise equivtest.NotSupported", mistakes.OddHeads, mistakes.divided_heads),
    Mistake("no gradient", "leave out detach()", mistakes.Detached, mistakes.rowwise, {"training": SGD}),
    Mistake("in-place on input", "change a copy", mistakes.InPlace, mistakes.rowwise),
    Mistake("wrong dtype", "did you mean 'float32'", changes={"dtypes": ("float_32",)}),
    Mistake("no rank", "such as (1, 2)", changes={"world_sizes": (0,)}),
)


def problem_of(mistake: Mistake, message: str) -> str:
    if not message:
        return "not found"
    if (num_lines := len(message.splitlines())) > MOST_LINES:
        return f"{num_lines} lines"
    if "Traceback" in message or '  File "' in message:
        return "a traceback"
    return "" if mistake.way_out in message else f"no way out: {mistake.way_out}"


def main() -> int:
    problems = 0
    for mistake in MISTAKES:
        message = mistake.message()
        problem = problem_of(mistake, message)
        problems += bool(problem)
        print(f"{mistake.name}: {problem or f'{len(message.splitlines())} lines'}")
        print("\n".join(f"    {line}" for line in message.splitlines()) + "\n", flush=True)
    print(f"{len(MISTAKES)} mistakes, {problems} messages to mend")
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
