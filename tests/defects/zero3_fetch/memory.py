"""ZeRO-3 fetches that mishandle memory: they read it stale, keep, round or lose values, in one way each."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch.distributed.device_mesh import DeviceMesh

from equivtest.families.zero3.fetch.case import FetchCase, RefusedFetchCase
from equivtest.families.zero3.fetch.subject import Fetch, Fetcher, fetch_by_all_gather, fetch_by_all_reduce, run_fetch
from equivtest.tensors import Placed
from tests.defects.defect import Replacing, argument_of
from tests.defects.zero3_fetch.partitions import Given, Parameters

wrong_all_reduce = Replacing("zero3_fetch_all_reduce")
wrong_all_gather = Replacing("zero3_fetch_all_gather")

Answers = dict[str, Placed]
LATE_S = 0.02  # longer than the other ranks take to look at their buffers

# Stale memory.


@wrong_all_reduce(
    "uninitialised memory reaches a value",
    FetchCase(world_size=2),
    "one rank fills its whole buffer itself; of two, the second adds what it found in memory",
)
def buffer_not_zeroed(case: FetchCase, mesh: DeviceMesh, given: Given) -> Answers:
    """all_reduce: the flat buffer holds whatever was in memory, except for the own partitions."""
    return run_fetch(case, mesh, given, _all_reduce_into(lambda like, numel: like.new_empty((numel,))))


@wrong_all_gather(
    "a collective not waited for",
    FetchCase(world_size=2),
    "one rank waits for no other; of two, the first looks before the second has come",
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


# State kept from an earlier call.

_kept: dict[str, tuple[FetchCase, torch.Tensor]] = {}  # by defect: the case of the last call, its buffer
_calls: dict[str, int] = {}  # by defect


@wrong_all_reduce(
    "state across calls",
    FetchCase(world_size=2, values=(("dense", 0), ("dense", 1))),
    "one rank overwrites its whole buffer; of two, the second adds the sum of the call before",
)
def buffer_kept_from_the_last_call(case: FetchCase, mesh: DeviceMesh, given: Given) -> Answers:
    """all_reduce: a second call for the same case finds the first one's sums in its buffer."""

    def keep(like: torch.Tensor, numel: int) -> torch.Tensor:
        kept = _kept.get("buffer")
        if kept is None or kept[0] != case:
            _kept["buffer"] = case, like.new_zeros((numel,))
        return _kept["buffer"][1]

    return run_fetch(case, mesh, given, _all_reduce_into(keep))


@wrong_all_gather(
    "a cache keyed too coarsely",
    FetchCase(world_size=1, parameters=((1,), (1,)), requires_grad=(True, True)),
    "two parameters of one element each share an entry, on one rank too",
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


@wrong_all_reduce(
    "state across calls",
    FetchCase(world_size=2, values=(("special", 0),), repeats=True),
    "one rank overwrites its whole buffer; of two, the second adds +0.0 or -0.0 to the first one's -0.0",
    claim="repeats_itself",
)
def alternates(case: FetchCase, mesh: DeviceMesh, given: Given) -> Answers:
    """all_reduce: every second call of a process clears its buffer to -0.0, which keeps signs of zero."""
    _calls["alternates"] = _calls.get("alternates", 0) + 1
    zero = -0.0 if _calls["alternates"] % 2 == 0 else 0.0
    return run_fetch(case, mesh, given, _all_reduce_into(lambda like, numel: like.new_full((numel,), zero)))


# Values rounded, replaced or lost.


@wrong_all_gather("rounded on its way", FetchCase(world_size=1), "one number of 24 significand bits suffices")
def rounds_through_bfloat16(case: FetchCase, mesh: DeviceMesh, given: Given) -> Answers:
    """all_gather: float32 parameters travel as bfloat16."""
    return _changed(case, mesh, given, fetch_by_all_gather, lambda whole: whole.to(torch.bfloat16).to(whole.dtype))


@wrong_all_gather(
    "rounded on its way",
    FetchCase(world_size=1, values=(("special", 10),)),
    "one element suffices; the special value number 10 is the smallest subnormal",
)
def flushes_subnormals(case: FetchCase, mesh: DeviceMesh, given: Given) -> Answers:
    """all_gather: subnormal numbers come back as zero."""

    def flush(whole: torch.Tensor) -> torch.Tensor:
        return torch.where(whole.abs() < torch.finfo(whole.dtype).tiny, torch.zeros_like(whole), whole)

    return _changed(case, mesh, given, fetch_by_all_gather, flush)


@wrong_all_reduce(
    "special values replaced",
    FetchCase(world_size=1, values=(("special", 4),)),
    "one element suffices; the special value number 4 is the first NaN",
)
def replaces_nan(case: FetchCase, mesh: DeviceMesh, given: Given) -> Answers:
    """all_reduce: NaN in a parameter comes back as zero, which hides that training has diverged."""
    inf = float("inf")
    return _changed(
        case, mesh, given, fetch_by_all_reduce, lambda whole: whole.nan_to_num(nan=0.0, posinf=inf, neginf=-inf)
    )


@wrong_all_gather(
    "special values replaced",
    FetchCase(world_size=1, values=(("special", 0),)),
    "one element suffices; the special value number 0 is -0.0",
    claim="is_exact_without_reduction",
)
def loses_signs_of_zero(case: FetchCase, mesh: DeviceMesh, given: Given) -> Answers:
    """all_gather: zero is added to values that should only be copied."""
    return _changed(case, mesh, given, fetch_by_all_gather, lambda whole: whole + 0.0)


@wrong_all_reduce(
    "special values replaced",
    FetchCase(world_size=2, values=(("special", 1),)),
    "one rank adds nothing; of two, the second adds +0.0 to the -0.0 that number 1, +0.0, was turned into",
    claim="is_exact_but_for_added_zeros",
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


@wrong_all_reduce(
    "a special path for one rank",
    FetchCase(world_size=1, values=(("special", 0),)),
    "one element suffices; more ranks go the common way",
    claim="is_the_identity_for_one_rank",
)
def adds_zero_on_one_rank(case: FetchCase, mesh: DeviceMesh, given: Given) -> Answers:
    """all_reduce: a shortcut for one rank alone rounds -0.0 to +0.0."""
    shortcut = mesh.size() == 1
    return _changed(case, mesh, given, fetch_by_all_reduce, lambda whole: whole + 0.0 if shortcut else whole)


# Missing refusals.


@wrong_all_gather(
    "misfits accepted",
    RefusedFetchCase(world_size=1, parameters=((1,), (1,)), requires_grad=(True, True)),
    "two dtypes need two parameters; one rank accepts them too",
    claim="refuses",
)
def promotes_mixed_dtypes(case: RefusedFetchCase, mesh: DeviceMesh, given: Given) -> Answers:
    """all_gather: parameters of another dtype than the first are cast to it instead of refused."""
    wholes = list(given.values())
    cast = {name: whole.detach().to(wholes[0].dtype) for name, whole in given.items()}
    return run_fetch(case, mesh, cast, fetch_by_all_gather)


@wrong_all_reduce(
    "ranks that diverge",
    RefusedFetchCase(world_size=2, parameters=((1,), (1,)), requires_grad=(True, True)),
    "a second rank is needed to accept what the first refuses; two dtypes need two parameters",
    claim="refuses",
)
def only_the_first_rank_refuses(case: RefusedFetchCase, mesh: DeviceMesh, given: Given) -> Answers:
    """all_reduce: the other ranks answer their inputs, as if there were nothing to fetch."""
    if mesh.get_local_rank() == 0:
        return run_fetch(case, mesh, given, fetch_by_all_reduce)
    return {name: Placed(whole, case.layouts()[name]) for name, whole in given.items()}


def _all_reduce_into(make_buffer: Callable[[torch.Tensor, int], torch.Tensor]) -> Fetcher:
    """The all_reduce fetch, its flat buffer of so many elements like a partition made by `make_buffer`."""
    return partial(fetch_by_all_reduce, make_buffer=make_buffer)


def _changed(
    case: FetchCase, mesh: DeviceMesh, given: Given, fetch: Fetcher, change: Callable[[torch.Tensor], torch.Tensor]
) -> Answers:
    """Answers like `fetch`, with `change` applied to every whole parameter."""
    answers = run_fetch(case, mesh, given, fetch)
    for name in case.given_names():
        whole = answers[name].local
        answers[name] = replace(answers[name], local=change(whole.detach()).requires_grad_(whole.requires_grad))
    return answers
