"""The life of parameters under ZeRO-3: what is a case, what is right, and what store and meter do."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from equivtest.base import limits
from equivtest.cases.values import draw
from equivtest.families.zero3.fetch.subject import (
    DtypeError,
    Fetcher,
    StatusError,
    fetch_by_all_gather,
    fetch_by_all_reduce,
)
from equivtest.families.zero3.lifecycle.case import MAX_OPERATIONS, REFUSALS, VERBS, LifecycleCase
from equivtest.families.zero3.lifecycle.oracle.model import Model, moments
from equivtest.families.zero3.lifecycle.subject import NoMemory
from equivtest.families.zero3.lifecycle.subject.memory import Meter
from equivtest.families.zero3.lifecycle.subject.store import NeverSavedError, Store
from equivtest.families.zero3.lifecycle.values import budget
from equivtest.families.zero3.subject.gradients import Gradients
from equivtest.oracle import expect
from equivtest.oracle.collectives import expected_collectives
from equivtest.oracle.exact import InexactData
from equivtest.property import Space
from equivtest.tensors import SIGNIFICAND_BITS
from equivtest.verdicts.claims import gradients_equal_unsharded
from tests.drawing import STRATEGIES, drawn
from tests.families.refusing import refuses

both = pytest.mark.parametrize("fetcher", [fetch_by_all_gather, fetch_by_all_reduce])
TWO: dict[str, Any] = {"parameters": ((5,), (2, 2)), "requires_grad": (True, True)}


def cases_of(world_size: int, num: int = 40) -> list[LifecycleCase]:
    return drawn(STRATEGIES["zero3_lifecycle_all_gather"](Space((world_size,), limits.DTYPES)), num)  # type: ignore[arg-type]


# Cases.


test_error_for_an_invalid_case_names_the_invalid_field = refuses(
    functools.partial(LifecycleCase, world_size=2),
    ({"operations": ()}, "operations must be 1 to 16, got 0"),
    ({"operations": ("step",) * 17}, "operations must be 1 to 16, got 17"),
    ({"operations": ("gather 0",)}, "an operation must be one of fetch, launch, fail, .* got 'gather 0'"),
    ({"operations": ("fetch first",)}, "must name its parameters by their numbers, got 'fetch first'"),
    ({"operations": ("fetch",)}, "fetch must name at least one parameter, got 'fetch'"),
    ({"operations": ("step 0",)}, "step must name no parameter, got 'step 0'"),
    ({"operations": ("use 0 0",)}, "use must name each parameter only once, got 'use 0 0'"),
    ({"operations": ("fetch 1",)}, "'fetch 1' names an unknown parameter"),
    ({"parameters": (), "requires_grad": ()}, "parameters must hold at least one shape"),
    ({"requires_grad": (True, True)}, "requires_grad must have one flag per parameter: 1, got 2"),
)


def test_case_with_mixed_dtypes_gives_every_second_parameter_another_dtype() -> None:
    case = LifecycleCase(world_size=1, mixed_dtypes=True, **TWO)

    assert [case.dtype_of(0), case.dtype_of(1), replace(case, dtype="float64").dtype_of(1)] == [
        *("float32", "float64", "float32")
    ]
    assert draw(case, 0)["param.1"].dtype == torch.float64


def test_drawn_lifecycles_are_long_and_have_mostly_accepted_operations() -> None:
    sequences = [list(moments(case, 0)) for world_size in (1, 2, 3, 4) for case in cases_of(world_size, 60)]
    everything = [moment for sequence in sequences for moment in sequence]
    refused = [moment for moment in everything if moment.refusal != "none"]

    assert {moment.operation.verb for moment in everything if moment.refusal == "none"} == set(VERBS) - {"fail"}
    assert {moment.operation.verb for moment in refused} == set(VERBS) - {"wait"}
    assert {moment.refusal for moment in everything} == set(REFUSALS)
    assert len(refused) < 0.4 * len(everything)
    assert sum(len(sequence) >= 9 for sequence in sequences) >= 0.5 * len(sequences)


def test_gradients_are_judged_only_after_an_accepted_use_of_a_trainable_parameter() -> None:
    refused = LifecycleCase(world_size=1, operations=("use 0",))
    frozen = LifecycleCase(world_size=1, operations=("fetch 0", "use 0"), requires_grad=(False,))

    assert not any(name.startswith("grad.") for name in frozen.answer_names())
    assert gradients_equal_unsharded.judge(refused, expect(refused, 0), {}) is None


# Values.


@pytest.mark.parametrize("bits", sorted(set(SIGNIFICAND_BITS.values())))
def test_gradient_sums_fit_the_dtype_on_every_world_size(bits: int) -> None:
    for world_size in range(1, limits.MAX_WORLD_SIZE + 1):
        contributing, quotient, largest = budget(world_size, bits)
        assert 1 <= contributing <= world_size and quotient % 2 == largest % 2 == 1
        assert world_size * contributing * quotient <= 2**bits
        assert 2 * largest + MAX_OPERATIONS * contributing * quotient <= 2**bits


def test_lifecycle_data_whose_gradient_could_round_is_refused() -> None:
    """For a gradient, whose terms here add up to more than 24 bits hold."""
    case = LifecycleCase(world_size=3, operations=("fetch 0", "use 0"))
    given = draw(case, 0)
    given["op1.cotangent.0"] = torch.tensor([[2.0**24], [2.0**24], [3.0]])
    model = Model(case, given)
    fetch, use = case.sequence()

    assert model.run(0, fetch) == "none"
    with pytest.raises(
        InexactData, match=r"grad\.0: a sum may reach \d+ units, but torch.float32 is exact only up to 2\*\*24"
    ):
        model.run(1, use)


# Refusals.


@pytest.mark.parametrize(
    ("operations", "refusals"),
    [
        (("use 0", "release 0", "update 0", "save 0"), ("status",) * 4),
        (("fetch 0", "fetch 1 0", "launch 0", "load 0"), ("none", "status", "status", "status")),
        (("launch 0", "fetch 0", "use 0", "release 0", "wait", "use 0"), ("none", *("status",) * 3, "none", "none")),
        (("fetch 0 0", "fail 0", "fetch 0", "fail 0"), ("status", "out of memory", "none", "status")),
        (("load 0", "fetch 0", "save 0", "release 0", "load 0"), ("never saved", *("none",) * 4)),
        (("fetch 0", "use 0", "step", "release 0", "step"), ("none", "none", "status", "none", "none")),
        (("step", "wait", "fetch 1", "step"), ("none",) * 4),
    ],
)
def test_operation_is_refused_if_a_status_forbids_it(operations: tuple[str, ...], refusals: tuple[str, ...]) -> None:
    case = LifecycleCase(world_size=2, operations=operations, **TWO)

    assert tuple(moment.refusal for moment in moments(case, 0)) == refusals


def test_fetch_of_parameters_of_two_dtypes_is_refused() -> None:
    case = LifecycleCase(world_size=2, operations=("fetch 0 1", "fetch 0", "fetch 1"), mixed_dtypes=True, **TWO)

    assert [moment.refusal for moment in moments(case, 0)] == ["dtype", "none", "none"]


# Costs: two ranks, 5 elements padded to 6 and 4 to 4, each with 4 bytes.

OPERATIONS = ("fetch 0 1", "use 0", "release 1", "save 0", "release 0")


@pytest.mark.parametrize(
    ("collective", "fetched_bytes", "wholes"),
    [("all_gather", 20, [40, 40, 24, 24, 0]), ("all_reduce", 40, [40, 40, 40, 40, 0])],
)
def test_oracle_expects_collectives_and_memory_from_the_partition_sizes(
    collective: str, fetched_bytes: int, wholes: list[int]
) -> None:
    case = LifecycleCase(world_size=2, operations=OPERATIONS, collective=collective, measures=True, **TWO)
    expected = expect(case, 0).tensors

    assert [(call.kind, call.size_bytes) for call in expected_collectives(case, 0)] == [
        (collective, fetched_bytes),
        ("reduce_scatter", 24),
    ]
    assert [expected[f"memory.after{number}"].value.tolist() for number in range(5)] == [
        [20, wholes[0], 0, 0, 0],
        [20, wholes[1], 12, 0, 0],
        [20, wholes[2], 12, 0, 0],
        [20, wholes[3], 12, 20, 0],
        [20, wholes[4], 12, 20, 0],
    ]


def test_parameter_without_elements_calls_no_collective() -> None:
    case = LifecycleCase(world_size=2, parameters=((0, 3),), operations=("fetch 0", "use 0"))

    assert expected_collectives(case, 0) == ()


# The store, on one rank.


def store_of(mesh: DeviceMesh, fetcher: Fetcher) -> Store:
    """Three parameters, the last of another dtype."""
    wholes = [torch.arange(6.0).reshape(2, 3), torch.ones(()), torch.ones(2, dtype=torch.float64)]
    return Store(wholes, mesh, fetcher, padding=0.0)


@both
def test_fetch_that_raises_memory_error_leaves_no_parameter_in_flight(alone: DeviceMesh, fetcher: Fetcher) -> None:
    store = store_of(alone, fetcher)
    with pytest.raises(MemoryError), NoMemory():  # type: ignore[no-untyped-call]
        store.fetch([0, 1])
    store.fetch([1, 0])

    assert torch.equal(store.parameters[0].whole, torch.arange(6.0).reshape(2, 3))  # type: ignore[arg-type]
    assert not store.fetching


@both
def test_refused_operation_leaves_all_parameters_unchanged(alone: DeviceMesh, fetcher: Fetcher) -> None:
    store = store_of(alone, fetcher)
    store.fetch([0])
    refused: list[tuple[type[Exception], str, Callable[[], object]]] = [
        (StatusError, "parameter 0 is AVAILABLE; only a NOT_AVAILABLE one can be fetched", lambda: store.fetch([0, 1])),
        (StatusError, "parameter 1 comes twice", lambda: store.fetch([1, 1])),
        (DtypeError, r"one dtype, got torch\.float32, torch\.float64", lambda: store.fetch([1, 2])),
        (StatusError, "parameter 1 is NOT_AVAILABLE; it must be AVAILABLE to be used", lambda: store.use([1], {}, {})),
        (StatusError, "to be released", lambda: store.release([0, 1])),
        (StatusError, "to be updated from outside", lambda: store.update([1], {})),
        (StatusError, "to be saved", lambda: store.save([1])),
        (StatusError, "parameter 0 is AVAILABLE; it must be NOT_AVAILABLE to be loaded", lambda: store.load([0])),
        (NeverSavedError, "parameter 1 was never saved; save it while it is AVAILABLE", lambda: store.load([1])),
    ]
    before = [parameter.status for parameter in store.parameters]
    for error, message, operation in refused:
        with pytest.raises(error, match=message):
            operation()

    assert [parameter.status for parameter in store.parameters] == before
    assert not store.fetching and not store.saved


def test_reducing_empty_gradients_calls_no_collective(monkeypatch: pytest.MonkeyPatch, alone: DeviceMesh) -> None:
    monkeypatch.setattr("equivtest.families.zero3.subject.gradients.reduce_scatter", None)
    gradients = Gradients(alone, padding=0.0)
    gradients.add("0", torch.ones(0, 2))

    assert gradients.partitions["0"].shape == (0,)


# The meter.


def test_memory_measurement_counts_a_storage_with_several_views_once() -> None:
    own = torch.ones(4)
    meter = Meter([own])
    with meter:
        made = own * 2
        view = made[1:]
        own.add_(1)

    assert list(meter.alive().values()) == [16] and meter.unaccounted([view]) == 0
    del made
    assert meter.unaccounted([]) == 16
    del view
    assert meter.unaccounted([]) == 0 and not meter.alive()
