"""Tiny subjects, and the visit function that runs them in ranks in place of the real one."""

from __future__ import annotations

import gc
import importlib
import os
import signal
import sys
import tempfile
import threading
import time
import types
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from equivtest.cases.case import Case, replicated
from equivtest.cases.case_tensor import CaseTensor
from equivtest.errors import Misuse
from equivtest.ranks.backend import Backend
from equivtest.ranks.channel import Channel
from equivtest.ranks.messages import START_ID
from equivtest.ranks.reply import Answer, Reply
from equivtest.ranks.wire import encode_reply
from equivtest.tensors import Placed


@dataclass(frozen=True, kw_only=True)
class PlainCase(Case):
    """A case for subjects that ignore it.

    Attributes:
        culprit: The rank that misbehaves.
        numel: Elements of the answer.
        refused: Why the case lies outside the contract, or ''.
    """

    culprit: int = 0
    numel: int = 1
    refused: str = ""

    @property
    def refusal(self) -> str:
        return self.refused

    def describe_tensors(self) -> dict[str, CaseTensor]:
        return {"output": CaseTensor((self.numel,), replicated(), "output")}


class Unspeakable(Exception):
    """Neither printed nor pickled."""

    def __init__(self) -> None:
        super().__init__(lambda: None, threading.Lock())

    def __str__(self) -> str:
        raise RuntimeError("no words")


def visit(subject: str, case: PlainCase, backend: Backend) -> tuple[Answer, ...]:
    """Calls the function of this module that `subject` names."""
    local = globals()[subject](case)
    if local is None:
        local = torch.tensor([float(os.getpid())], dtype=torch.float64)
    return (Answer({"output": Placed(local, replicated(), tuple(local.shape))}),)


def meet() -> torch.Tensor:
    """The sum of a one from each rank."""
    count = torch.ones(1)
    dist.all_reduce(count)
    return count


def is_culprit(case: PlainCase) -> bool:
    return dist.get_rank() == case.culprit


def trivial(case: PlainCase) -> None:
    """Answers at once."""


def counts(case: PlainCase) -> torch.Tensor:
    return meet()


def imports_late(case: PlainCase) -> torch.Tensor:
    from tests.programs.late import FACTOR

    return FACTOR * meet()


def runs_backward(case: PlainCase) -> torch.Tensor:
    x = torch.ones(1, requires_grad=True)
    (x * meet()).sum().backward()
    assert x.grad is not None
    return x.grad


def large(case: PlainCase) -> torch.Tensor:
    return torch.arange(case.numel, dtype=torch.float64) + dist.get_rank()


def raises_alone(case: PlainCase) -> torch.Tensor:
    if is_culprit(case):
        raise ValueError("the culprit's own words")
    return meet()


def raises_late(case: PlainCase) -> torch.Tensor:
    """The peers have been inside the collective for a while."""
    if is_culprit(case):
        time.sleep(0.2)
    return raises_alone(case)


def raises_everywhere(case: PlainCase) -> None:
    raise ValueError("refused")


def raises_out_of_step(case: PlainCase) -> None:
    """Every rank raises, but the culprit leaves a collective behind that its peers never join."""
    if is_culprit(case):
        dist.all_reduce(torch.ones(1, dtype=torch.int64), async_op=True)
    raise ValueError("refused")


def misuses(case: PlainCase) -> None:
    raise Misuse("no such thing")


def raises_unspeakably(case: PlainCase) -> None:
    raise Unspeakable


def raises_surrogates(case: PlainCase) -> None:
    raise ValueError("no text: \udc80")


def killed(case: PlainCase) -> torch.Tensor:
    if is_culprit(case):
        os.kill(os.getpid(), signal.SIGKILL)
    return meet()


def exits_0(case: PlainCase) -> torch.Tensor:
    if is_culprit(case):
        os._exit(0)
    return meet()


def exits_3(case: PlainCase) -> torch.Tensor:
    if is_culprit(case):
        print("last words", file=sys.stderr)
        os._exit(3)
    return meet()


def raises_system_exit(case: PlainCase) -> torch.Tensor:
    if is_culprit(case):
        sys.exit(3)
    return meet()


def crashes(case: PlainCase) -> torch.Tensor:
    if is_culprit(case):
        os.kill(os.getpid(), signal.SIGSEGV)
    return meet()


def hangs_in_python(case: PlainCase) -> torch.Tensor:
    if is_culprit(case):
        while True:
            time.sleep(0.01)
    return meet()


def hangs_in_collective(case: PlainCase) -> torch.Tensor | None:
    return None if is_culprit(case) else meet()


def answers_twice(case: PlainCase) -> None:
    """Answers this very request early, a long past one again, and then this one as usual."""
    frame = sys._getframe()
    while "request_id" not in frame.f_locals:
        assert frame.f_back is not None
        frame = frame.f_back
    for request_id in (START_ID, frame.f_locals["request_id"]):
        reply = Reply(rank=dist.get_rank(), outcome="answered", error_text=f"early, to {request_id}")
        _channel().send(encode_reply(request_id, reply, Path("/nonexistent")))


def _channel() -> Channel:
    return next(found for found in gc.get_objects() if isinstance(found, Channel))


def talks_nonsense(case: PlainCase) -> None:
    _channel().send(b"\xc1nonsense")


def prints_much(case: PlainCase) -> None:
    for _ in range(100):
        print("x" * 100_000)


def sees_environment(case: PlainCase) -> torch.Tensor:
    return torch.tensor([float(os.environ.get("EQUIVTEST_TEST", "-1"))])


def imports_a_family(case: PlainCase) -> torch.Tensor:
    """Returns 1 if a module of equivtest was imported before, and imports the module."""
    name = "equivtest.families.scale.subject"
    found = name in sys.modules
    importlib.import_module(name)
    return torch.tensor([float(found)])


def counts_defaults(case: PlainCase) -> torch.Tensor:
    """Returns the number of functions, and the number of functions with a process group as a default argument."""
    gc.unfreeze()
    functions = [each for each in gc.get_objects() if isinstance(each, types.FunctionType)]
    groups = [each for each in functions if any(isinstance(it, dist.ProcessGroup) for it in each.__defaults__ or ())]
    return torch.tensor([len(functions), len(groups)])


def says_main(case: PlainCase) -> None:
    """Raises with the path of the script that the rank takes for the parent's."""
    main = sys.modules["__main__"]
    raise ValueError(f"{getattr(main, '__file__', 'no file')}")


def stays_mute(case: PlainCase) -> None:
    """Closes every descriptor it has, and lives on."""
    os.closerange(3, 100)
    time.sleep(600)


def ends_later(case: PlainCase) -> None:
    """Answers, then ends while it is idle."""
    if is_culprit(case):
        threading.Timer(0.1, os._exit, (7,)).start()


def killed_with_a_temporary_folder(case: PlainCase) -> torch.Tensor:
    """One rank dies while it writes, say, a checkpoint beside a file of a library."""
    if is_culprit(case):
        folder = Path(tempfile.mkdtemp(prefix="checkpoint-"))
        (folder / "optimizer.pt").write_bytes(bytes(100))
        print(folder, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    return meet()


def forks(case: PlainCase) -> None:
    """Leaves a child behind."""
    child = os.fork()
    if child == 0:
        time.sleep(600)
        os._exit(0)
    raise ValueError(f"child {child}")


def waits(case: PlainCase) -> None:
    """Says that it has begun, and waits until it may go on."""
    folder = Path(os.environ["EQUIVTEST_TEST_FOLDER"])
    if not (folder / "go on").exists():
        (folder / str(os.getpid())).touch()
    while not (folder / "go on").exists():
        time.sleep(0.01)
