"""ZeRO-3 fetches that are wrong in what they find in memory, keep, round or lose; in one way each."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch.distributed.device_mesh import DeviceMesh

from equivtest.families.zero3.fetch.case import FetchCase, RefusedFetchCase
from equivtest.families.zero3.fetch.subject import (
    Fetch,
    Fetcher,
    fetch_by_all_gather,
    fetch_by_all_reduce,
    run_fetch,
)
from equivtest.tensors import Placed
from tests.defects.defect import argument_of, defect
from tests.defects.zero3_fetch.partitions import Given, Parameters

Answers = dict[str, Placed]
LATE_S = 0.02  # longer than the other ranks take to look at their buffers

# What was in memory before.


@defect(
    replaces="zero3_fetch_all_reduce",
    family="uninitialised memory reaches a value",
    claim="equals_unsharded",
    smallest=FetchCase(world_size=2),
    why="one rank fills its whole buffer itself; of two, the second adds what it found in memory",
)
def buffer_not_zeroed(case: FetchCase, mesh: DeviceMesh, given: Given) -> Answers:
    """all_reduce: the flat buffer holds whatever was in memory, except for the own partitions."""
    return run_fetch(case, mesh, given, _all_reduce_into(lambda like, numel: like.new_empty((numel,))))


@defect(
    replaces="zero3_fetch_all_gather",
    family="a collective not waited for",
    claim="equals_unsharded",
    smallest=FetchCase(world_size=2),
    why="one rank waits for nobody; of two, the first looks before the second has come",
)
@argument_of(run_fetch)
def taken_before_it_arrives(parameters: Parameters, mesh: DeviceMesh) -> Fetch:
    """all_gather: the buffer is taken apart before the collective has ended; the last rank is late.

    Without the late rank this is a race, which the collective sometimes wins.
    """
    if mesh.size() > 1 and mesh.get_local_rank() == mesh.size() - 1:
        time.sleep(LATE_S)
    fetching = fetch_by_all_gather(parameters, mesh)
    if mesh.size() > 1:
        fetching.finish()
        return replace(fetching, finish=lambda: None)
    return fetching


# What was kept from an earlier call.

_kept: dict[str, tuple[FetchCase, torch.Tensor]] = {}  # by defect: the case of the last call, its buffer
_calls: dict[str, int] = {}  # by defect


@defect(
    replaces="zero3_fetch_all_reduce",
    family="state across calls",
    claim="equals_unsharded",
    smallest=FetchCase(world_size=2, values=(("dense", 0), ("dense", 1))),
    why="one rank overwrites its whole buffer; of two, the second adds the sum of the call before",
)
def buffer_kept_from_the_last_call(case: FetchCase, mesh: DeviceMesh, given: Given) -> Answers:
    """all_reduce: a second call for the same case finds the first one's sums in its buffer."""

    def keep(like: torch.Tensor, numel: int) -> torch.Tensor:
        kept = _kept.get("buffer")
        if kept is None or kept[0] != case:
            _kept["buffer"] = case, like.new_zeros((numel,))
        return _kept["buffer"][1]

    return run_fetch(case, mesh, given, _all_reduce_into(keep))


@defect(
    replaces="zero3_fetch_all_gather",
    family="a cache keyed too coarsely",
    claim="equals_unsharded",
    smallest=FetchCase(world_size=1, parameters=((1,), (1,)), requires_grad=(True, True)),
    why="two parameters of one element each share an entry, on one rank too",
)
@argument_of(run_fetch)
def cached_by_numel(parameters: Parameters, mesh: DeviceMesh) -> Fetch:
    """all_gather: parameters that are equal in numel share an entry of the cache, hence their values."""
    fetching = fetch_by_all_gather(parameters, mesh)

    def finish() -> None:
        fetching.finish()
        cache: dict[int, torch.Tensor] = {}
        for parameter in parameters:
            assert parameter.whole is not None
            cached = cache.setdefault(parameter.numel, parameter.whole)
            parameter.whole = cached.detach().clone().view(parameter.shape)

    return replace(fetching, finish=finish)


@defect(
    replaces="zero3_fetch_all_reduce",
    family="state across calls",
    claim="repeats_itself",
    kind="repeat",
    smallest=FetchCase(world_size=2, values=(("special", 0),), repeats=True),
    why="one rank overwrites its whole buffer; of two, the second adds +0.0 or -0.0 to the first one's -0.0",
)
def alternates(case: FetchCase, mesh: DeviceMesh, given: Given) -> Answers:
    """all_reduce: every second call of a process clears its buffer to -0.0, which keeps signs of zero."""
    _calls["alternates"] = _calls.get("alternates", 0) + 1
    zero = -0.0 if _calls["alternates"] % 2 == 0 else 0.0
    return run_fetch(case, mesh, given, _all_reduce_into(lambda like, numel: like.new_full((numel,), zero)))


# What was rounded, replaced or lost.


@defect(
    replaces="zero3_fetch_all_gather",
    family="rounded on its way",
    claim="equals_unsharded",
    smallest=FetchCase(world_size=1),
    why="one number of 24 significand bits suffices",
)
def rounds_through_bfloat16(case: FetchCase, mesh: DeviceMesh, given: Given) -> Answers:
    """all_gather: float32 parameters travel as bfloat16."""
    return _changed(case, mesh, given, fetch_by_all_gather, lambda whole: whole.to(torch.bfloat16).to(whole.dtype))


@defect(
    replaces="zero3_fetch_all_gather",
    family="rounded on its way",
    claim="equals_unsharded",
    smallest=FetchCase(world_size=1, values=(("special", 10),)),
    why="one element suffices; the special value number 10 is the smallest subnormal",
)
def flushes_subnormals(case: FetchCase, mesh: DeviceMesh, given: Given) -> Answers:
    """all_gather: what is smaller than the smallest normal number comes back as zero."""

    def flush(whole: torch.Tensor) -> torch.Tensor:
        return torch.where(whole.abs() < torch.finfo(whole.dtype).tiny, torch.zeros_like(whole), whole)

    return _changed(case, mesh, given, fetch_by_all_gather, flush)


@defect(
    replaces="zero3_fetch_all_reduce",
    family="special values replaced",
    claim="equals_unsharded",
    smallest=FetchCase(world_size=1, values=(("special", 4),)),
    why="one element suffices; the special value number 4 is the first NaN",
)
def replaces_nan(case: FetchCase, mesh: DeviceMesh, given: Given) -> Answers:
    """all_reduce: NaN in a parameter comes back as zero, so that nobody sees that training has diverged."""
    inf = float("inf")
    return _changed(
        case, mesh, given, fetch_by_all_reduce, lambda whole: whole.nan_to_num(nan=0.0, posinf=inf, neginf=-inf)
    )


@defect(
    replaces="zero3_fetch_all_gather",
    family="special values replaced",
    claim="is_exact_without_reduction",
    kind="bits",
    smallest=FetchCase(world_size=1, values=(("special", 0),)),
    why="one element suffices; the special value number 0 is -0.0",
)
def loses_signs_of_zero(case: FetchCase, mesh: DeviceMesh, given: Given) -> Answers:
    """all_gather: zero is added to what was only to be copied."""
    return _changed(case, mesh, given, fetch_by_all_gather, lambda whole: whole + 0.0)


@defect(
    replaces="zero3_fetch_all_reduce",
    family="special values replaced",
    claim="is_exact_but_for_added_zeros",
    kind="bits",
    smallest=FetchCase(world_size=2, values=(("special", 1),)),
    why="one rank adds nothing; of two, the second adds +0.0 to the -0.0 that number 1, +0.0, was turned into",
)
@argument_of(run_fetch)
def sums_the_negative(parameters: Parameters, mesh: DeviceMesh) -> Fetch:
    """all_reduce: the negative is summed and negated again, so that +0.0 comes back as -0.0."""
    own = [parameter.partition for parameter in parameters]
    for parameter in parameters:
        parameter.partition = -parameter.partition
    fetching = fetch_by_all_reduce(parameters, mesh)

    def finish() -> None:
        for parameter, partition in zip(parameters, own, strict=True):
            assert parameter.whole is not None
            parameter.partition, parameter.whole = partition, -parameter.whole

    return replace(fetching, finish=finish)


@defect(
    replaces="zero3_fetch_all_reduce",
    family="a way of its own for one rank",
    claim="is_the_identity_for_one_rank",
    kind="bits",
    smallest=FetchCase(world_size=1, values=(("special", 0),)),
    why="one element suffices; more ranks go the common way",
)
def adds_zero_on_one_rank(case: FetchCase, mesh: DeviceMesh, given: Given) -> Answers:
    """all_reduce: one rank alone takes a way of its own, on which -0.0 is rounded to +0.0."""
    shortcut = mesh.size() == 1
    return _changed(case, mesh, given, fetch_by_all_reduce, lambda whole: whole + 0.0 if shortcut else whole)


# What was not refused.


@defect(
    replaces="zero3_fetch_all_gather",
    family="misfits accepted",
    claim="refuses",
    kind="not_refused",
    smallest=RefusedFetchCase(world_size=1, parameters=((1,), (1,)), requires_grad=(True, True)),
    why="two dtypes need two parameters; one rank accepts them too",
)
def promotes_mixed_dtypes(case: RefusedFetchCase, mesh: DeviceMesh, given: Given) -> Answers:
    """all_gather: parameters of another dtype than the first are cast to it instead of refused."""
    wholes = list(given.values())
    cast = {name: whole.detach().to(wholes[0].dtype) for name, whole in given.items()}
    return run_fetch(case, mesh, cast, fetch_by_all_gather)


@defect(
    replaces="zero3_fetch_all_reduce",
    family="ranks that diverge",
    claim="refuses",
    kind="not_refused",
    smallest=RefusedFetchCase(world_size=2, parameters=((1,), (1,)), requires_grad=(True, True)),
    why="a second rank is needed to accept what the first refuses; two dtypes need two parameters",
)
def only_the_first_rank_refuses(case: RefusedFetchCase, mesh: DeviceMesh, given: Given) -> Answers:
    """all_reduce: the other ranks answer what they were given, as if there were nothing to fetch."""
    if mesh.get_local_rank() == 0:
        return run_fetch(case, mesh, given, fetch_by_all_reduce)
    return {name: Placed(whole, case.layouts()[name]) for name, whole in given.items()}


def _all_reduce_into(make_buffer: Callable[[torch.Tensor, int], torch.Tensor]) -> Fetcher:
    """The all_reduce fetch, its flat buffer of so many elements like a partition made by `make_buffer`."""
    return partial(fetch_by_all_reduce, make_buffer=make_buffer)


def _changed(
    case: FetchCase, mesh: DeviceMesh, given: Given, fetch: Fetcher, change: Callable[[torch.Tensor], torch.Tensor]
) -> Answers:
    """What `fetch` gives, but for `change` of every whole parameter."""
    answers = run_fetch(case, mesh, given, fetch)
    for name in case.given_names():
        whole = answers[name].local
        answers[name] = replace(answers[name], local=change(whole.detach()).requires_grad_(whole.requires_grad))
    return answers
