"""A process group in Python that has gloo do its work, and is wrong in the one way that FAULT names."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import distributed as dist
from torch._C._distributed_c10d import _create_work_from_future
from torch.futures import Future

from tests.programs.backend import Wrapper

FAULT = "EQUIVTEST_TEST_FAULT"
"""Environment variable: the name of a fault; '' is honest."""

ReduceOp = dist.ReduceOp


def done(result: Any) -> Any:
    """Work that has ended."""
    future: Future[Any] = Future()
    future.set_result(result)
    return _create_work_from_future(future)


RENAMED = {
    "_allgather_base": "all_gather_single",
    "_reduce_scatter_base": "reduce_scatter_single",
    "alltoall_base": "all_to_all_single",
}
"""Methods of a group in torch 2.12, and the methods that torch 2.13 calls instead (PyProcessGroup.hpp)."""


class Planted(Wrapper):
    """Gloo under another name; each subclass is wrong in one collective, which it overrides by its older name.

    FAULT names a subclass: `drops_rank` is the class DropsRank.
    """

    kinds: ClassVar[dict[str, type[Planted]]] = {}

    def __init_subclass__(cls) -> None:
        cls.kinds[re.sub("(?<!^)(?=[A-Z])", "_", cls.__name__).lower()] = cls
        for old, new in RENAMED.items():
            if old in vars(cls):
                setattr(cls, new, vars(cls)[old])

    def getBackendName(self) -> str:
        return "planted"


class SwappedGather(Planted):
    def _allgather_base(self, output: torch.Tensor, given: torch.Tensor, options: Any = None) -> Any:
        work = self._inner._allgather_base(output, given, *([options] if options else []))
        work.wait()
        rows = output.view(self.size(), -1)
        if self.size() > 1:
            rows[:2] = rows[:2].flip(0).clone()
        return work


class EarlyWait(Planted):
    """The sum arrives 50 ms after it was waited for."""

    def allreduce(self, tensors: list[torch.Tensor], options: Any = None) -> Any:
        copy = tensors[0].clone()
        self._inner.allreduce([copy], options or dist.AllreduceOptions()).wait()

        def arrive() -> None:
            time.sleep(0.05)
            tensors[0].copy_(copy)

        threading.Thread(target=arrive, daemon=True).start()
        return done(tensors)


class RaisesAttribute(Planted):
    def _reduce_scatter_base(self, *args: Any) -> Any:
        raise AttributeError("'Planted' object has no attribute 'stream'")


class DropsRank(Planted):
    """Loses the last rank's operand, in float16 only."""

    def allreduce(self, tensors: list[torch.Tensor], options: Any = None) -> Any:
        if tensors[0].dtype == torch.float16 and self.rank() == self.size() - 1 and self.size() > 1:
            tensors[0].zero_()
        return self._inner.allreduce(tensors, options or dist.AllreduceOptions())


class DropsNinthRank(Planted):
    """Loses the operands of rank 8 in a reduce_scatter of lists."""

    def reduce_scatter(self, outputs: Any, given: list[list[torch.Tensor]], options: Any = None) -> Any:
        if self.rank() == 8:
            given = [[torch.zeros_like(each) for each in part] for part in given]
        return self._inner.reduce_scatter(outputs, given, options or dist.ReduceScatterOptions())


class WrongWhenLarge(Planted):
    """The last element is off by one in tensors of 1,000 elements or more."""

    def allreduce(self, tensors: list[torch.Tensor], options: Any = None) -> Any:
        work = self._inner.allreduce(tensors, options or dist.AllreduceOptions())
        work.wait()
        if tensors[0].numel() >= 1000:
            tensors[0].view(-1)[-1] += 1
        return work


class ForgetsRemainder(Planted):
    """Does not gather the remainder after vectors of 8 elements from the other ranks."""

    def _allgather_base(self, output: torch.Tensor, given: torch.Tensor, options: Any = None) -> Any:
        work = self._inner._allgather_base(output, given, *([options] if options else []))
        work.wait()
        left = given.numel() % 8
        if given.numel() > 8 and left:
            output.view(self.size(), -1)[:, -left:] = given.view(-1)[-left:]
        return work


class WrongOnOneRank(Planted):
    """Rank 1 alone gets its first element with the other sign."""

    def _reduce_scatter_base(self, output: torch.Tensor, given: torch.Tensor, options: Any = None) -> Any:
        work = self._inner._reduce_scatter_base(output, given, options or dist.ReduceScatterOptions())
        work.wait()
        if self.rank() == 1 and output.numel():
            output.view(-1)[0] *= -1
        return done([output])  # gloo's work copies its result again whenever it is waited for


class OtherRoot(Planted):
    def broadcast(self, tensors: list[torch.Tensor], options: Any = None) -> Any:
        options.rootRank = (options.rootRank + 1) % self.size()
        return self._inner.broadcast(tensors, options)


class AverageIsSum(Planted):
    """Takes a sum for an average, in bfloat16 only."""

    def allreduce(self, tensors: list[torch.Tensor], options: Any = None) -> Any:
        if tensors[0].dtype == torch.bfloat16 and options is not None and options.reduceOp == ReduceOp.AVG:
            options.reduceOp = ReduceOp.SUM
        return self._inner.allreduce(tensors, options or dist.AllreduceOptions())


class Premultiplies(Planted):
    """No fault: it has PREMUL_SUM, as NCCL has and gloo has not."""

    def allreduce(self, tensors: list[torch.Tensor], options: Any = None) -> Any:
        if options is not None and options.reduceOp == ReduceOp.PREMUL_SUM:
            tensors[0].mul_(self.factor(options.reduceOp))
            options.reduceOp = ReduceOp.SUM
        return self._inner.allreduce(tensors, options or dist.AllreduceOptions())

    def factor(self, operation: Any) -> float:
        return float(operation.__getstate__()[1])


class MessagesInTurn(Planted):
    """No fault: as with NCCL, a message has ended only once it was received, and the next one begins only then."""

    def send(self, tensors: list[torch.Tensor], other: int, tag: int) -> Any:
        self._inner.send(tensors, other, tag).wait()
        self._inner.recv([torch.empty(1)], other, tag).wait()
        return done(tensors)

    def recv(self, tensors: list[torch.Tensor], other: int, tag: int) -> Any:
        self._inner.recv(tensors, other, tag).wait()
        self._inner.send([torch.ones(1)], other, tag).wait()
        return done(tensors)


class ForgetsFactor(Premultiplies):
    def factor(self, operation: Any) -> float:
        return 1.0


class OtherOrder(Planted):
    def _reduce_scatter_base(self, output: torch.Tensor, given: torch.Tensor, options: Any = None) -> Any:
        rolled = given.view(self.size(), -1).roll(1, 0).reshape(given.shape)
        return self._inner._reduce_scatter_base(output, rolled, options or dist.ReduceScatterOptions())


class NothingExchanged(Planted):
    """Each rank keeps what it should send, if all send equal sizes."""

    def alltoall_base(self, output: torch.Tensor, given: torch.Tensor, *others: Any) -> Any:
        work = self._inner.alltoall_base(output, given, *others)
        work.wait()
        if not others[0]:
            output.copy_(given)
        return work


class Hangs(Planted):
    def alltoall_base(self, *args: Any) -> Any:
        time.sleep(600)


class EndsARank(Planted):
    def scatter(self, *args: Any) -> Any:
        if self.rank() == self.size() - 1 and self.size() > 1:
            os._exit(3)
        return self._inner.scatter(*args)


class MaxFromZero(Planted):
    def allreduce(self, tensors: list[torch.Tensor], options: Any = None) -> Any:
        work = self._inner.allreduce(tensors, options or dist.AllreduceOptions())
        if options is not None and options.reduceOp == ReduceOp.MAX:
            work.wait()
            tensors[0].clamp_(min=0)
        return work


class WrongOnThree(Planted):
    """Swaps the last two gathered parts, on three ranks only."""

    def _allgather_base(self, output: torch.Tensor, given: torch.Tensor, options: Any = None) -> Any:
        work = self._inner._allgather_base(output, given, *([options] if options else []))
        work.wait()
        if self.size() == 3:
            rows = output.view(3, -1)
            rows[1:] = rows[1:].flip(0).clone()
        return work


class SendsFewerBits(Planted):
    """float64 travels as float32."""

    def broadcast(self, tensors: list[torch.Tensor], options: Any = None) -> Any:
        work = self._inner.broadcast(tensors, options)
        work.wait()
        if tensors[0].dtype == torch.float64:
            tensors[0].copy_(tensors[0].float())
        return work


class Refuses(Planted):
    """No fault: it documents that it reduces no bfloat16."""

    def allreduce(self, tensors: list[torch.Tensor], options: Any = None) -> Any:
        if tensors[0].dtype == torch.bfloat16:
            raise NotImplementedError("this group reduces no bfloat16")
        return self._inner.allreduce(tensors, options or dist.AllreduceOptions())


class RefusesLarge(Planted):
    """Broadcasts up to 30 elements, and refuses more."""

    def broadcast(self, tensors: list[torch.Tensor], options: Any = None) -> Any:
        if tensors[0].numel() > 30:
            raise NotImplementedError("this group broadcasts few elements")
        return self._inner.broadcast(tensors, options)


class RefusesOnOneRank(Planted):
    """Rank 1 alone refuses a collective that is not probed."""

    def allreduce_coalesced(self, *args: Any) -> Any:
        if self.rank() == 1:
            raise NotImplementedError("rank 1 reduces one at a time")
        return self._inner.allreduce_coalesced(*args)


class RefusesMax(Planted):
    """No fault: it documents that it has no maxima, and no products."""

    def allreduce(self, tensors: list[torch.Tensor], options: Any = None) -> Any:
        if options is not None and any(options.reduceOp == op for op in (ReduceOp.MAX, ReduceOp.PRODUCT)):
            raise NotImplementedError("this group only adds and takes minima")
        return self._inner.allreduce(tensors, options or dist.AllreduceOptions())


class RefusesMaxAndIsWrong(RefusesMax):
    """Also its minima are off by one from three elements on."""

    def allreduce(self, tensors: list[torch.Tensor], options: Any = None) -> Any:
        work = super().allreduce(tensors, options)
        if options is not None and options.reduceOp == ReduceOp.MIN and tensors[0].numel() > 2:
            work.wait()
            tensors[0] += 1
        return work


def create(options: Any, _: Any) -> dist.ProcessGroup:
    fault = os.environ.get(FAULT)
    return (Planted.kinds[fault] if fault else Planted)(options)


_creator: Callable[[Any, Any], dist.ProcessGroup] = create
dist.Backend.register_backend("planted", _creator, extended_api=True, devices=["cpu"])
