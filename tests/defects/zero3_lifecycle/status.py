"""Lives of ZeRO-3's parameters with wrong refusals, memory or calls, in one way each."""

from __future__ import annotations

from collections.abc import Sequence

from torch.distributed.device_mesh import DeviceMesh

from equivtest.families.zero3.fetch.subject import (
    Fetch,
    PartitionedParameter,
    Status,
    fetch_by_all_gather,
    launch,
    release,
)
from equivtest.families.zero3.lifecycle.case import LifecycleCase
from equivtest.families.zero3.lifecycle.subject import Answers, Given, Life
from equivtest.families.zero3.lifecycle.subject.store import Store
from tests.defects.defect import Replacing
from tests.defects.zero3_lifecycle.life import live

wrong_all_reduce = Replacing("zero3_lifecycle_all_reduce")
wrong_all_gather = Replacing("zero3_lifecycle_all_gather")

# Statuses and refusals.


@wrong_all_reduce(
    "state after a failure",
    LifecycleCase(world_size=1, operations=("fail 0",), collective="all_reduce"),
    "the status after the failure tells",
)
def in_flight_after_failure(case: LifecycleCase, mesh: DeviceMesh, given: Given) -> Answers:
    """all_reduce: a fetch for which there was no memory leaves its parameters in flight for good."""

    class Wrong(Store):
        def launch(self, indices: Sequence[int]) -> None:
            try:
                super().launch(indices)
            except MemoryError:
                for index in indices:
                    self.parameters[index].status = Status.IN_FLIGHT
                raise

    return live(case, mesh, given, Wrong)


@wrong_all_reduce(
    "state after a release",
    LifecycleCase(
        world_size=1,
        parameters=((1,), (1,)),
        requires_grad=(True, True),
        operations=("fetch 0 1", "release 0"),
        collective="all_reduce",
    ),
    "one of two parameters is released",
    kind="shape",
)
def release_takes_the_group(case: LifecycleCase, mesh: DeviceMesh, given: Given) -> Answers:
    """all_reduce: with one parameter all that are available are released, fetched together or not."""

    class Wrong(Store):
        def release(self, indices: Sequence[int]) -> None:
            self.need(indices, Status.AVAILABLE, "released")
            available = [i for i, parameter in enumerate(self.parameters) if parameter.status is Status.AVAILABLE]
            super().release(available)

    return live(case, mesh, given, Wrong)


@wrong_all_gather(
    "misfits accepted",
    LifecycleCase(world_size=1, operations=("fetch 0", "use 0", "step")),
    "a gradient, and a whole that is still there",
)
def steps_while_whole(case: LifecycleCase, mesh: DeviceMesh, given: Given) -> Answers:
    """all_gather: partitions are updated while the whole parameters exist, which then have old values."""

    class Wrong(Store):
        def need(self, indices: Sequence[int], status: Status, done: str) -> None:
            if done != "updated":
                super().need(indices, status, done)

    return live(case, mesh, given, Wrong)


@wrong_all_gather(
    "misfits accepted", LifecycleCase(world_size=1, operations=("fetch 0 0",)), "one parameter can be named twice"
)
def takes_one_twice(case: LifecycleCase, mesh: DeviceMesh, given: Given) -> Answers:
    """all_gather: a parameter that is named twice is fetched, once, instead of refused."""

    class Wrong(Store):
        def launch(self, indices: Sequence[int]) -> None:
            super().launch(tuple(dict.fromkeys(indices)))

    return live(case, mesh, given, Wrong)


# Memory and collectives.


@wrong_all_reduce(
    "memory kept",
    LifecycleCase(world_size=1, operations=("fetch 0", "release 0"), measures=True, collective="all_reduce"),
    "only what is available can be released",
    claim="uses_only_documented_memory",
)
def whole_kept_after_release(case: LifecycleCase, mesh: DeviceMesh, given: Given) -> Answers:
    """all_reduce: a released parameter is no longer available, but its memory is not given back."""

    class Wrong(Store):
        def release(self, indices: Sequence[int]) -> None:
            self.need(indices, Status.AVAILABLE, "released")
            for index in indices:
                self.parameters[index].status = Status.NOT_AVAILABLE

    return live(case, mesh, given, Wrong)


@wrong_all_gather(
    "memory kept",
    LifecycleCase(world_size=1, operations=("fetch 0",), measures=True),
    "one fetch makes one buffer",
    claim="uses_only_documented_memory",
)
def gathered_buffer_kept(case: LifecycleCase, mesh: DeviceMesh, given: Given) -> Answers:
    """all_gather: the fetch that has ended is kept, and with it the buffer that was taken apart."""

    class Wrong(Store):
        def launch(self, indices: Sequence[int]) -> None:
            super().launch(indices)
            self.__dict__.setdefault("kept", []).append(self.fetching[-1])

    return live(case, mesh, given, Wrong)


@wrong_all_gather(
    "other collectives than documented",
    LifecycleCase(
        world_size=1, parameters=((1,), (1,)), requires_grad=(True, True), operations=("fetch 0 1",), records=True
    ),
    "two parameters take two collectives",
    claim="uses_only_collectives",
)
def fetched_one_by_one(case: LifecycleCase, mesh: DeviceMesh, given: Given) -> Answers:
    """all_gather: a fetch of several parameters takes one collective for each."""

    def fetch(parameters: Sequence[PartitionedParameter], mesh: DeviceMesh) -> Fetch:
        launch(parameters)  # which refuses what it must
        release(parameters)
        each = [fetch_by_all_gather([parameter], mesh) for parameter in parameters]

        def finish() -> None:
            for one in each:
                one.wait()

        return Fetch(parameters, None, finish)

    return Life(case, mesh, given, fetch).answers()
