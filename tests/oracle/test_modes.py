"""`Mode`: dynamo is not imported for it, and compiles nothing of it."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from equivtest.oracle.modes import Mode


class Multiplying(Mode):
    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        return torch.ops.aten.mul.Tensor(args[0], args[1])


class MultipliesAsTorch(TorchDispatchMode):
    __torch_dispatch__ = Multiplying.__dict__["__torch_dispatch__"].__wrapped__


class MultipliesCompiled(MultipliesAsTorch):
    __torch_dispatch__ = Multiplying.__dict__["__torch_dispatch__"].__wrapped__

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def num_graphs(mode: TorchDispatchMode) -> int:
    """Compiles an addition, runs it in the mode, and counts what dynamo compiles."""
    graphs = []

    def compiled(graph: torch.fx.GraphModule, _inputs: object) -> Any:
        graphs.append(graph)
        return graph.forward

    x, add = torch.ones(3), torch.compile(torch.add, backend=compiled)
    torch._dynamo.reset()
    with mode:
        add(x, x)
    return len(graphs)


def test_operations_under_a_mode_of_the_oracle_do_not_import_dynamo() -> None:
    code = (
        "import sys, torch; from equivtest.oracle.certificate import Certificate\n"
        "x = torch.ones(2, 2).double()\nwith Certificate(torch.float32): torch.nn.functional.linear(x, x)\n"
        "print('torch._dynamo' in sys.modules)"
    )

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)

    assert done.stdout == "False\n"


@pytest.mark.filterwarnings("ignore")
def test_dynamo_compiles_as_many_graphs_in_an_oracle_mode_as_in_a_torch_mode() -> None:
    assert num_graphs(Multiplying()) == num_graphs(MultipliesAsTorch()) != num_graphs(MultipliesCompiled())
