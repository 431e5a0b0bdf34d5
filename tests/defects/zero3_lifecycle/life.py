"""Lives of ZeRO-3's parameters that end in wrong values, in one way each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh

from equivtest.families.zero3.fetch.subject import Fetcher, Status, fetch_by_all_gather, fetch_by_all_reduce
from equivtest.families.zero3.lifecycle.case import LifecycleCase
from equivtest.families.zero3.lifecycle.subject import Answers, Given, Life
from equivtest.families.zero3.lifecycle.subject.store import Store, whole_of
from equivtest.families.zero3.subject.gradients import Gradients
from tests.defects.defect import Replacing

wrong_all_gather = Replacing("zero3_lifecycle_all_gather")
wrong_all_reduce = Replacing("zero3_lifecycle_all_reduce")

FETCHERS: dict[str, Fetcher] = {"all_gather": fetch_by_all_gather, "all_reduce": fetch_by_all_reduce}


def live(case: LifecycleCase, mesh: DeviceMesh, given: Given, store_class: type[Store]) -> Answers:
    """A right life with the given store."""
    return Life(case, mesh, given, FETCHERS[case.collective], store_class).answers()


# One of two copies is left behind.


@wrong_all_gather(
    "a copy left behind",
    LifecycleCase(world_size=1, operations=("fetch 0", "update 0")),
    "a new value needs a whole, which then is the old one",
)
def stale_whole_after_update(case: LifecycleCase, mesh: DeviceMesh, given: Given) -> Answers:
    """all_gather: a new value goes to the partitions; the whole that is present keeps the old one."""

    class Wrong(Store):
        def write_whole(self, index: int, new: torch.Tensor) -> None:
            pass

    return live(case, mesh, given, Wrong)


@wrong_all_reduce(
    "a copy left behind",
    LifecycleCase(world_size=1, operations=("fetch 0", "update 0"), collective="all_reduce"),
    "the partition is looked at before the whole is released",
)
def update_misses_the_partitions(case: LifecycleCase, mesh: DeviceMesh, given: Given) -> Answers:
    """all_reduce: a new value is written to the whole alone, and lost when that is released."""

    class Wrong(Store):
        def update(self, indices: Sequence[int], new: Mapping[int, torch.Tensor]) -> None:
            self.need(indices, Status.AVAILABLE, "updated from outside")
            for index in indices:
                self.write_whole(index, new[index])

    return live(case, mesh, given, Wrong)


@wrong_all_gather(
    "a copy left behind",
    LifecycleCase(world_size=1, operations=("fetch 0", "use 0", "release 0", "step", "fetch 0")),
    "between two fetches the partition must change, which an update does to the kept whole too",
)
def second_fetch_finds_the_first_buffer(case: LifecycleCase, mesh: DeviceMesh, given: Given) -> Answers:
    """all_gather: the first whole parameter is kept, and every later fetch returns it."""

    class Wrong(Store):
        def wait(self, index: int) -> None:
            super().wait(index)
            for other, parameter in enumerate(self.parameters):
                if parameter.whole is not None:
                    parameter.whole = self.__dict__.setdefault("kept", {}).setdefault(other, parameter.whole)

    return live(case, mesh, given, Wrong)


@wrong_all_reduce(
    "a copy left behind",
    LifecycleCase(
        world_size=1, operations=("fetch 0", "save 0", "update 0", "release 0", "load 0"), collective="all_reduce"
    ),
    "what was saved must change, and then be loaded",
)
def saves_a_reference(case: LifecycleCase, mesh: DeviceMesh, given: Given) -> Answers:
    """all_reduce: saves the whole parameter itself, which later updates change."""

    class Wrong(Store):
        def save(self, indices: Sequence[int]) -> None:
            self.need(indices, Status.AVAILABLE, "saved")
            self.saved |= {index: whole_of(self.parameters[index]).detach() for index in indices}

    return live(case, mesh, given, Wrong)


# Partitions.


@wrong_all_gather(
    "memory given back too soon",
    LifecycleCase(world_size=1, operations=("fetch 0", "release 0")),
    "only what is available can be released",
)
def release_drops_the_partition(case: LifecycleCase, mesh: DeviceMesh, given: Given) -> Answers:
    """all_gather: a release clears the partition together with the whole."""

    class Wrong(Store):
        def release(self, indices: Sequence[int]) -> None:
            super().release(indices)
            for index in indices:
                self.parameters[index].partition.zero_()

    return live(case, mesh, given, Wrong)


@wrong_all_reduce(
    "shard order",
    LifecycleCase(
        world_size=2,
        parameters=((1,),),
        operations=("fetch 0", "save 0", "release 0", "load 0"),
        collective="all_reduce",
    ),
    "two ranks: the first takes the padding of the second",
)
def shards_loaded_in_reverse(case: LifecycleCase, mesh: DeviceMesh, given: Given) -> Answers:
    """all_reduce: the ranks load the saved parts in reverse order."""

    class Wrong(Store):
        def load(self, indices: Sequence[int]) -> None:
            super().load(indices)
            for index in indices:
                partition = self.parameters[index].partition
                padded = partition.new_zeros(partition.numel() * mesh.size())
                padded[: self.saved[index].numel()] = self.saved[index].reshape(-1)
                partition.copy_(padded.view(mesh.size(), -1)[mesh.size() - 1 - mesh.get_local_rank()])

    return live(case, mesh, given, Wrong)


@wrong_all_gather(
    "ranks that diverge",
    LifecycleCase(world_size=2, parameters=((2,),), operations=("fetch 0", "use 0", "release 0", "step")),
    "the second of two ranks needs an element, the step a gradient",
)
def only_the_first_rank_steps(case: LifecycleCase, mesh: DeviceMesh, given: Given) -> Answers:
    """all_gather: only the first rank's partitions are updated."""

    class Wrong(Store):
        def descend(self, index: int, lr: float) -> None:
            if mesh.get_local_rank() == 0:
                super().descend(index, lr)

    return live(case, mesh, given, Wrong)


@wrong_all_gather(
    "shard order",
    LifecycleCase(world_size=2, parameters=((1,), (1,)), requires_grad=(True, True), operations=("fetch 0 1",)),
    "two ranks name two parameters in different order",
)
def asked_for_in_own_order(case: LifecycleCase, mesh: DeviceMesh, given: Given) -> Answers:
    """all_gather: each rank puts partitions into its buffer in the order in which it names them."""

    class Wrong(Store):
        def launch(self, indices: Sequence[int]) -> None:
            fetch = self.fetcher([self.parameters[index] for index in indices], self.mesh)
            self.fetching.append((tuple(indices), fetch))

    return live(case, mesh, given, Wrong)


# Gradients.


@wrong_all_gather(
    "a term missing",
    LifecycleCase(world_size=1, operations=("fetch 0", "use 0", "use 0")),
    "two uses of one parameter give two gradients to be added",
    claim="gradients_equal_unsharded",
)
def second_micro_batch_overwrites(case: LifecycleCase, mesh: DeviceMesh, given: Given) -> Answers:
    """all_gather: the gradient of a use replaces the earlier ones."""

    class Overwriting(Gradients):
        def add(self, name: str, gradient: torch.Tensor) -> None:
            self.partitions[name] = self.average(gradient)

    class Wrong(Store):
        gradients_class = Overwriting

    return live(case, mesh, given, Wrong)


@wrong_all_reduce(
    "state across steps",
    LifecycleCase(world_size=1, operations=("fetch 0", "use 0", "release 0", "step"), collective="all_reduce"),
    "after the first step there must be no gradient",
)
def gradients_outlive_the_step(case: LifecycleCase, mesh: DeviceMesh, given: Given) -> Answers:
    """all_reduce: gradients are not forgotten, and the next step takes them again."""

    class Clinging(Gradients):
        def clear(self) -> None:
            pass

    class Wrong(Store):
        gradients_class = Clinging

    return live(case, mesh, given, Wrong)
