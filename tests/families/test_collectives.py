"""Collectives alone: the case, its operands, the oracle against results by hand, and the ways of calling."""

from __future__ import annotations

import functools
import math
from collections import Counter
from functools import cache
from operator import and_, or_, xor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from equivtest.base import limits
from equivtest.cases.values import draw
from equivtest.errors import Unsupported
from equivtest.families.collectives import subject
from equivtest.families.collectives.case import BITWISE, BUNDLES, CALLS, OPERANDS, WAITS, CollectivesCase
from equivtest.families.collectives.oracle import add_at_limits
from equivtest.families.collectives.strategy import NUMELS, collectives_cases
from equivtest.families.collectives.subject import FUNCTIONS, CollectiveRaised, collectives
from equivtest.oracle import expect
from equivtest.oracle.exact import InexactData
from equivtest.oracle.operands import reduce_exactly
from equivtest.property import Space
from equivtest.pytest_plugin.suite import shipped
from equivtest.tensors import DTYPES, same_bits
from equivtest.verdicts.judging import one_thread
from tests.drawing import drawn
from tests.families.refusing import refuses

each_dtype = pytest.mark.parametrize("dtype", DTYPES)
ALL = tuple(CALLS)
ON_GLOO = tuple(name for name, call in CALLS.items() if call.op != "premul")


def case_of(**fields: Any) -> CollectivesCase:
    """Three ranks, two sizes."""
    return CollectivesCase(**{"world_size": 3, "collectives": ALL, "numels": (4, 1), **fields})


# ------------------------------------------------------------------------------------------------
# The case


test_error_for_an_invalid_case_names_the_invalid_field = refuses(
    case_of,
    ({"collectives": ("all_reduce",)}, "collectives must be some of all_reduce_sum, .*, got 'all_reduce'"),
    ({"collectives": ()}, r"collectives must hold at least one value, none of them twice, got \(\)"),
    ({"numels": (2, 2)}, r"numels must hold at least one value, none of them twice, got \(2, 2\)"),
    ({"numels": (-1,)}, r"numels must be at least 0, got \(-1,\)"),
    ({"records": True}, "set records=False"),
    ({"order": "transposed", "stride": 2}, "stride=2 is only for order='rows'"),
    ({"memory": "kept", "waits": "together"}, "memory='kept' needs waits='at_once' or 'async', got 'together'"),
)


def test_collectives_of_one_kind_take_operands_from_one_tensor() -> None:
    case = case_of(collectives=("all_reduce_max", "broadcast", "reduce_min"))

    assert case.given_names() == ("compared", "moved")
    assert [case.shapes()[name] for name in case.given_names()] == [(3, 15)] * 2
    assert case.bounds == ((0, 12), (12, 15))


def test_uneven_splits_have_parts_of_full_half_and_zero_length() -> None:
    case = case_of()
    splits = {(source, target): case.split(5, source, target) for source in range(3) for target in range(3)}

    assert set(splits.values()) == {0, 3, 5}
    assert any(splits[source, target] != splits[target, source] for source, target in splits)


def test_table_of_collectives_lists_exactly_the_functions_that_can_run() -> None:
    assert {call.function for call in CALLS.values()} == FUNCTIONS.keys()


# ------------------------------------------------------------------------------------------------
# Operands


@each_dtype
@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 7, 8, 61, 64])
def test_operands_of_reductions_can_be_reduced_exactly(world_size: int, dtype: str) -> None:
    case = CollectivesCase(world_size=world_size, dtype=dtype, collectives=ALL, numels=(5,))
    given = draw(case, 0)

    assert all(bool((value != 0).any()) for value in given.values())
    for op in ("sum", "avg", "product"):
        reduce_exactly(op, given[OPERANDS[op]], op, (1,))


@each_dtype
def test_copied_and_compared_values_use_all_bits_of_the_dtype(dtype: str) -> None:
    given = draw(case_of(dtype=dtype, numels=(1000,)), 0)
    largest = 2 ** round(1 - math.log2(torch.finfo(DTYPES[dtype]).eps))

    for name in ("moved", "compared"):
        assert bool((given[name].double() % 2 != 0).all())
        assert largest / 2 < float(given[name].double().abs().max()) < largest


def test_operands_differ_between_ranks_and_have_both_signs() -> None:
    for name, value in draw(case_of(numels=(1000,)), 0).items():
        assert bool((value > 0).any() and (value < 0).any()), name
        assert all(not torch.equal(value[a], value[b]) for a, b in ((0, 1), (0, 2), (1, 2))), name


@pytest.mark.parametrize(
    ("op", "operands", "message"),
    [
        ("product", [[2.0], [3.0]], "factors are no powers of two"),
        ("product", [[2.0**-10], [2.0**-10]], r"their product may be as small as 2\*\*-20"),
        ("avg", [[1.0], [1.0], [1.0]], "no multiples of 3"),
        ("sum", [[2048.0], [1.0]], "a sum may reach 2049 units"),
    ],
)
def test_reduction_whose_result_may_round_raises_inexact_data(
    op: str, operands: list[list[float]], message: str
) -> None:
    with pytest.raises(InexactData, match=message):
        reduce_exactly("x", torch.tensor(operands, dtype=torch.float16), op, (len(operands),))


# ------------------------------------------------------------------------------------------------
# The oracle


def written_out(case: CollectivesCase, name: str, rank: int) -> list[float]:
    """Lists one rank's final values of one collective, size after size in the last dim, from a list per rank."""
    call, ranks = CALLS[name], range(case.world_size)
    rows = draw(case, 0)[call.operand].double().tolist()
    found: list[list[list[float]]] = []
    for numel, (start, _) in zip(case.numels, case.bounds, strict=True):
        own = [[row[start + place] for place in range(case.world_size * numel)] for row in rows]
        reduced = [_reduced(call.op, [row[place] for row in own]) for place in range(case.world_size * numel)]
        parts = [row[rank * numel : (rank + 1) * numel] for row in own]
        sent = [value for source in ranks for value in parts[source][: case.split(numel, source, rank)]]
        found.append(
            {
                "reduced": [reduced[:numel]],
                "parts": [reduced[rank * numel : (rank + 1) * numel]],
                "gathered": [row[:numel] for row in own],
                "exchanged": parts,
                "uneven": [sent + [0.0] * (case.world_size * numel - len(sent))],
            }[call.result]
        )
    return [value for row in zip(*found, strict=True) for part in row for value in part]


def _reduced(op: str, values: list[float]) -> float:
    if op in ("max", "min"):
        return max(values) if op == "max" else min(values)
    if op == "product":
        return math.prod(values)
    if op in BITWISE:
        return float(functools.reduce({"band": and_, "bor": or_, "bxor": xor}[op], map(int, values)))
    return sum(values) / {"avg": len(values), "premul": 2}.get(op, 1)


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_oracle_equals_results_written_by_hand(name: str, world_size: int) -> None:
    case = case_of(world_size=world_size, collectives=(name,), numels=(4, 0, 1))
    expected = expect(case, 0).tensors[name]
    is_whole = CALLS[name].result in ("reduced", "gathered")

    for rank in range(world_size):
        local = expected.value if is_whole else expected.value[rank]
        assert local.flatten().tolist() == written_out(case, name, rank)


@each_dtype
def test_every_result_of_a_collective_must_equal_the_bits_that_the_oracle_expects(dtype: str) -> None:
    tensors = expect(case_of(dtype=dtype), 0).tensors

    assert {name for name, tensor in tensors.items() if tensor.bits is not None and tensor.allowed is None} == set(ALL)
    assert all(
        torch.equal(tensor.value, tensor.bits.double()) for tensor in tensors.values() if tensor.bits is not None
    )


def test_all_reduce_avg_over_seven_ranks_in_float32_is_judged_within_a_bound() -> None:
    """On seven ranks, in float32: see `equivtest.oracle.averages`."""
    tensors = expect(CollectivesCase(world_size=7, collectives=("all_reduce_avg", "all_reduce_sum")), 0).tensors

    assert tensors["all_reduce_avg"].allowed is not None and tensors["all_reduce_avg"].bits is None
    assert tensors["all_reduce_sum"].allowed is None


def test_special_values_are_copied_with_every_bit() -> None:
    case = case_of(collectives=("all_gather", "all_reduce_sum"), values=(("special", 8),), numels=(40,))
    found = expect(case, 0).tensors

    assert bool(found["all_gather"].value.isnan().any()) and not bool(found["all_reduce_sum"].value.isnan().any())
    bits = found["all_gather"].bits
    assert bits is not None and same_bits(bits, draw(case, 0)["moved"][:, :40])


@each_dtype
@pytest.mark.parametrize("world_size", [1, 2, 3, 8, 64])
def test_special_values_give_infinite_sums_largest_sums_and_ordinary_sums(world_size: int, dtype: str) -> None:
    names = ("all_reduce_sum", "all_reduce_premul", "all_reduce_max", "all_reduce_min")
    case = CollectivesCase(
        world_size=world_size, dtype=dtype, collectives=names, numels=(24,), values=(("special", 1),)
    )
    tensors, largest = expect(case, 0).tensors, torch.finfo(DTYPES[dtype]).max

    assert {largest, -largest} <= set(tensors["all_reduce_sum"].value.tolist())
    for name in ("all_reduce_sum", "all_reduce_max", "all_reduce_min"):
        values = set(tensors[name].value.tolist())
        assert {math.inf, -math.inf} <= values and len(values) > 8, name
    assert not any(bool(tensor.value.isnan().any()) for tensor in tensors.values())


@pytest.mark.parametrize(
    "column",
    [
        [65504.0, 65504.0, -65504.0],  # infinite or not, as the order has it
        [math.inf, -math.inf, 1.0],
        [math.nan, 1.0, 1.0],
        [40000.0, 1.0, 1.0],  # rounded
    ],
)
def test_sum_that_depends_on_its_order_raises(column: list[float]) -> None:
    with pytest.raises(InexactData, match="depends on its order"):
        add_at_limits(torch.tensor(column, dtype=torch.float16)[:, None], 1.0)


class Adds:
    """Stands for a synchronous collective in place that adds a number."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __call__(self, tensor: torch.Tensor, **_: object) -> None:
        tensor.add_(self.number)


@each_dtype
def test_int64_result_that_is_off_by_one_is_wrong(
    alone: DeviceMesh, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    case = CollectivesCase(world_size=1, dtype=dtype, collectives=("int64_all_reduce_sum",), numels=(9,))
    right = answer(case, alone)["int64_all_reduce_sum"]
    assert same_bits(right, draw(case, 0)["counted"][0])

    for change in (1, -1, 2**20):
        monkeypatch.setattr(dist, "all_reduce", Adds(change))
        assert bool((answer(case, alone)["int64_all_reduce_sum"] != right).all())


# ------------------------------------------------------------------------------------------------
# Examples


@cache
def examples() -> tuple[CollectivesCase, ...]:
    return shipped()["collectives"].examples  # type: ignore[return-value]


def test_every_collective_has_examples_in_every_dtype_on_one_to_four_ranks() -> None:
    pinned = {(name, case.dtype, case.world_size) for case in examples() for name in case.collectives}

    assert pinned >= {(name, dtype, ranks) for name in CALLS for dtype in DTYPES for ranks in limits.WORLD_SIZES}


def test_every_collective_has_examples_of_every_size_and_a_large_example() -> None:
    pinned = {(name, numel) for case in examples() for name in case.collectives for numel in case.numels}

    assert pinned >= {(name, numel) for name in CALLS for numel in (*NUMELS, 2**17 + 1)}


def test_examples_group_collectives_that_a_backend_supports_together() -> None:
    """A backend that lacks one of them is not judged on a case that has it."""
    bundles = {tuple(call.name for call in calls) for calls in BUNDLES.values()}
    pinned = {case.collectives for case in examples()}

    assert pinned >= bundles
    assert all(any(set(names) <= set(bundle) for bundle in bundles) for names in pinned)


def test_each_collective_function_has_a_separate_example_on_strided_operands() -> None:
    """gloo's faults in one of them would keep a whole bundle from running."""
    assert [len(case.collectives) for case in examples() if case.stride > 1] == [1] * len(FUNCTIONS)
    assert {call.function for case in examples() if case.stride > 1 for call in case.calls} == FUNCTIONS.keys()


@pytest.mark.parametrize(
    ("field", "values"),
    [("order", {"rows", "transposed", "channels_last"}), ("memory", {"new", "kept", "freed"})],
)
def test_every_collective_has_examples_on_every_kind_of_memory(field: str, values: set[str]) -> None:
    pinned = {(name, getattr(case, field)) for case in examples() for name in case.collectives}

    assert pinned == {(name, value) for name in CALLS for value in values}


@each_dtype
def test_every_collective_has_an_aligned_and_an_unaligned_example(dtype: str) -> None:
    """If operands of 16 bits begin at an odd multiple of 2 bytes."""
    places = {
        (name, case.offset % 2) for case in examples() if case.dtype == dtype and case.world_size > 1
        for name in case.collectives
    }  # fmt: skip

    assert places == {(name, odd) for name in CALLS for odd in (0, 1)}


def test_every_function_of_tensors_has_an_example_above_4_mib() -> None:
    largest = {
        call.function
        for case in examples()
        if max(case.numels) * DTYPES[case.dtype].itemsize > 2**22
        for call in case.calls
    }

    assert {name for name in FUNCTIONS if not name.endswith(("object", "object_list", "barrier"))} == largest


def test_every_collective_has_an_example_on_eight_ranks() -> None:
    assert {name for case in examples() if case.world_size == 8 for name in case.collectives} == set(CALLS)


def test_collectives_are_drawn_with_every_size_and_every_way_to_wait() -> None:
    cases = drawn(collectives_cases(Space((2,), limits.DTYPES)), 400)

    assert {name for case in cases for name in case.collectives} == set(ON_GLOO)
    assert Counter(case.waits for case in cases).keys() == set(WAITS)
    assert len(cases) / 10 < sum(case.stride > 1 for case in cases) < len(cases) / 3
    assert {numel for case in cases for numel in case.numels} == set(NUMELS)


# ------------------------------------------------------------------------------------------------
# Ways of calling


def answer(case: CollectivesCase, mesh: DeviceMesh) -> dict[str, torch.Tensor]:
    return {name: placed.local for name, placed in collectives(case, mesh, draw(case, 0)).items()}


def test_on_many_ranks_a_case_has_one_draw_and_size_and_a_slow_collective_few_elements() -> None:
    largest: dict[bool, set[int]] = {True: set(), False: set()}
    for case in drawn(collectives_cases(Space((64,), limits.DTYPES)), 200):
        assert (len(case.values), len(case.numels), case.repeats) == (1, 1, False)
        largest[any(CALLS[name].function == "reduce_scatter" for name in case.collectives)].add(max(case.numels))

    assert max(largest[True]) == 3 and max(largest[False]) > 1000


@pytest.mark.parametrize(("waits", "stride"), [*((waits, 1) for waits in WAITS), ("together", 3)])
def test_every_collective_is_right_in_a_group_of_one_rank(alone: DeviceMesh, waits: str, stride: int) -> None:
    """Gloo scatters wrong elements of strided operands (finding 96)."""
    names = tuple(name for name in ON_GLOO if stride == 1 or name != "scatter")
    case = case_of(world_size=1, waits=waits, numels=(4, 0, 1), collectives=names, stride=stride)
    with one_thread():
        found = answer(case, alone)

    for name, tensor in expect(case, 0).tensors.items():
        assert tensor.bits is not None and same_bits(found[name], tensor.bits), name


class Unwilling:
    """Stands for a collective that raises."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __call__(self, *_: object, **__: object) -> None:
        raise self.error


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (NotImplementedError("not here"), Unsupported),
        (RuntimeError("Invalid scalar type"), Unsupported),
        (AttributeError("no such thing"), CollectiveRaised),
    ],
)
def test_error_within_a_collective_is_raised_again_with_the_name_of_the_collective(
    alone: DeviceMesh, monkeypatch: pytest.MonkeyPatch, error: Exception, kind: type[Exception]
) -> None:
    monkeypatch.setattr(dist, "all_to_all_single", Unwilling(error))
    text = f"all_to_all_single of float16 raised {type(error).__name__}: {error}"

    with pytest.raises(kind, match=f"^{text}$") as caught:
        answer(CollectivesCase(world_size=1, dtype="float16", collectives=("all_to_all_single",)), alone)
    assert getattr(caught.value, "lacking", None) in (None, ("float16:all_to_all_single",))


class Late:
    """A collective whose result is there from its wait until the next one begins."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.tensors: list[torch.Tensor] = []

    def __call__(self, tensor: torch.Tensor, **_: object) -> Late:
        for earlier in self.tensors:
            earlier.fill_(99)
        self.events.append("begin")
        self.tensors.append(tensor)
        return self

    def wait(self) -> None:
        self.events.append("wait")
        self.tensors[-1].fill_(len(self.events))


@pytest.mark.parametrize(
    ("waits", "events"), [("async", ["begin", "wait"] * 2), ("together", ["begin", "begin", "wait", "wait"])]
)
def test_case_sets_the_order_in_which_collectives_begin_and_end(
    alone: DeviceMesh, monkeypatch: pytest.MonkeyPatch, waits: str, events: list[str]
) -> None:
    late = Late()
    monkeypatch.setattr(dist, "all_reduce", late)
    answer(CollectivesCase(world_size=1, numels=(2, 3), waits=waits), alone)

    assert late.events == events


def test_collectives_may_be_waited_for_in_reverse_order(alone: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[int] = []

    def all_reduce(tensor: torch.Tensor, **_: object) -> SimpleNamespace:
        return SimpleNamespace(wait=lambda: waited.append(len(tensor)))

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    case = CollectivesCase(world_size=1, numels=(2, 3, 1), waits="backwards")
    found = answer(case, alone)

    assert waited == [1, 3, 2] and same_bits(found["all_reduce_sum"], draw(case, 0)["added"][0])


@pytest.mark.parametrize(("place", "stride"), [(-1, 1), (3, 1), (1, 2), (5, 2), (-1, 3), (4, 3), (8, 3)])
def test_collective_that_writes_outside_of_its_result_raises(
    alone: DeviceMesh, monkeypatch: pytest.MonkeyPatch, place: int, stride: int
) -> None:
    def all_reduce(tensor: torch.Tensor, **_: object) -> None:
        tensor.as_strided((1,), (1,), tensor.storage_offset() + place).zero_()

    monkeypatch.setattr(dist, "all_reduce", all_reduce)

    with pytest.raises(
        CollectiveRaised, match="all_reduce_sum of float32 raised RuntimeError: the collective wrote outside"
    ):
        answer(CollectivesCase(world_size=1, numels=(3,), stride=stride), alone)


def test_collective_that_writes_into_a_strided_operand_raises(
    alone: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is a copy of the harness's operand, so no claim sees it."""

    def all_gather(output: torch.Tensor, operand: torch.Tensor, **_: object) -> None:
        operand.zero_()

    monkeypatch.setattr(subject, "all_gather_single", all_gather)

    with pytest.raises(CollectiveRaised, match="RuntimeError: the collective wrote into its operand"):
        answer(case_of(world_size=1, collectives=("all_gather_into_tensor",), stride=2), alone)


@pytest.mark.parametrize("stride", [2, 3])
def test_operands_and_results_have_the_strides_of_the_case_in_larger_memory(
    alone: DeviceMesh, monkeypatch: pytest.MonkeyPatch, stride: int
) -> None:
    strides: list[tuple[int, ...]] = []

    def all_to_all_single(output: torch.Tensor, operand: torch.Tensor, *_: object, **__: object) -> None:
        strides.extend((output.stride(), operand.stride()))
        output.copy_(operand)

    monkeypatch.setattr(dist, "all_to_all_single", all_to_all_single)
    names = ("all_to_all_single", "all_to_all_single_uneven")
    case = CollectivesCase(world_size=1, collectives=names, numels=(3,), stride=stride)
    found = answer(case, alone)

    assert strides == [(stride,)] * 4
    assert same_bits(found["all_to_all_single"][0, 0], draw(case, 0)["moved"][0])


@pytest.mark.parametrize("memory", [{"stride": 2}, {"order": "transposed"}, {"order": "channels_last"}, {"offset": 1}])
def test_backend_that_refuses_noncontiguous_memory_gets_contiguous_operands(
    alone: DeviceMesh, monkeypatch: pytest.MonkeyPatch, memory: dict[str, Any]
) -> None:
    def all_reduce(tensor: torch.Tensor, **_: object) -> None:
        if not tensor.is_contiguous() or tensor.data_ptr() % 16:
            raise ValueError("Tensors must be contiguous and aligned")

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    case = CollectivesCase(world_size=1, numels=(12,), **memory)

    assert same_bits(answer(case, alone)["all_reduce_sum"], draw(case, 0)["added"][0])


@pytest.mark.parametrize(
    ("order", "shape", "strides"),
    [("transposed", (1, 3, 4), (12, 1, 3)), ("channels_last", (1, 3, 2, 2), (12, 1, 6, 3))],
)
def test_case_with_an_order_passes_operands_and_results_with_permuted_strides(
    alone: DeviceMesh, monkeypatch: pytest.MonkeyPatch, order: str, shape: tuple[int, ...], strides: tuple[int, ...]
) -> None:
    found: list[torch.Tensor] = []

    def all_to_all_single(output: torch.Tensor, operand: torch.Tensor, *_: object, **__: object) -> None:
        found.extend((output, operand))
        output.copy_(operand)

    monkeypatch.setattr(dist, "all_to_all_single", all_to_all_single)
    case = CollectivesCase(world_size=1, collectives=("all_to_all_single",), numels=(12,), order=order)
    result = answer(case, alone)["all_to_all_single"]

    assert [(tensor.shape, tensor.stride()) for tensor in found] == [(shape, strides)] * 2
    assert same_bits(result[0, 0], draw(case, 0)["moved"][0])


@pytest.mark.parametrize("memory", ["new", "kept"])
def test_reused_memory_has_the_same_address_and_new_content(
    alone: DeviceMesh, monkeypatch: pytest.MonkeyPatch, memory: str
) -> None:
    found: list[tuple[int, list[float]]] = []

    def all_reduce(tensor: torch.Tensor, **_: object) -> None:
        found.append((tensor.data_ptr(), tensor.tolist()))

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    case = CollectivesCase(world_size=1, numels=(4, 3), memory=memory)
    answer(case, alone)
    given = draw(case, 0)["added"][0]

    contents = [given[:4].tolist(), given[4:].tolist()]
    is_kept = memory == "kept"
    assert [content for _, content in found] == (
        [each for content in contents for each in (content[::-1], content)] if is_kept else contents
    )
    assert (len({address for address, _ in found}) == 1) == is_kept


def test_operands_are_allocated_at_the_addresses_of_freed_memory(
    alone: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[torch.Tensor] = []
    monkeypatch.setattr(dist, "reduce", lambda tensor, **_: found.append(tensor))
    case = CollectivesCase(world_size=1, collectives=("reduce_sum",), numels=(9, 1025), memory="freed", waits="async")
    answer(case, alone)

    assert [len(tensor) for tensor in found] == [9, 9, 1025, 1025]
    assert all(found[place].data_ptr() == found[place + 1].data_ptr() for place in (0, 2))
    assert len({tensor.untyped_storage()._cdata for tensor in found}) == 4


def test_case_with_an_offset_passes_unaligned_memory(alone: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    places: list[int] = []

    def all_to_all_single(output: torch.Tensor, operand: torch.Tensor, *_: object, **__: object) -> None:
        places.extend((output.data_ptr() % 16, operand.data_ptr() % 16))

    monkeypatch.setattr(dist, "all_to_all_single", all_to_all_single)
    answer(CollectivesCase(world_size=1, collectives=("all_to_all_single",), numels=(5,), offset=3), alone)

    assert places == [12, 12]


def test_tagged_send_on_nccl_is_reported_as_not_supported(alone: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_backend", lambda _: "nccl")

    with pytest.raises(Unsupported, match="tags are not supported with the NCCL backend"):
        answer(CollectivesCase(world_size=1, collectives=("tagged_send_and_receive",)), alone)


@pytest.mark.parametrize(("text", "stride"), [("out of memory", 2), ("Tensors must be contiguous", 1)])
def test_contiguous_operands_replace_strided_only_after_an_error_about_strides(
    alone: DeviceMesh, monkeypatch: pytest.MonkeyPatch, text: str, stride: int
) -> None:
    errors = [RuntimeError(text)]

    def all_reduce(tensor: torch.Tensor, **_: object) -> None:
        if errors:
            raise errors.pop()

    monkeypatch.setattr(dist, "all_reduce", all_reduce)

    with pytest.raises(CollectiveRaised, match=text):
        answer(CollectivesCase(world_size=1, numels=(3,), stride=stride), alone)


def test_result_of_an_asynchronous_collective_is_copied_when_it_is_waited_for(
    alone: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dist, "all_reduce", Late())
    found = answer(CollectivesCase(world_size=1, numels=(1, 2), waits="async"), alone)

    assert found["all_reduce_sum"].tolist() == [2, 4, 4]


def test_in_place_collective_gets_a_copy_of_its_operand(alone: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "all_reduce", Late())
    case = CollectivesCase(world_size=1, waits="async")
    given = draw(case, 0)
    collectives(case, alone, given)

    assert same_bits(given["added"], draw(case, 0)["added"])


@pytest.mark.parametrize("name", [name for name in ON_GLOO if not CALLS[name].is_coalesced])
def test_subject_named_collectives_never_writes_to_its_operands(alone: DeviceMesh, name: str) -> None:
    case = case_of(world_size=1, collectives=(name,))
    given = draw(case, 0)
    collectives(case, alone, given)

    assert all(same_bits(given[key], value) for key, value in draw(case, 0).items())
