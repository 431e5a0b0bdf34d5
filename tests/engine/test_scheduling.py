"""The items of a property run in one xdist worker."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from equivtest.pytest_plugin.costs import order_in_budget, weight_in_budget
from equivtest.pytest_plugin.scheduling import PropertyScheduling, property_of


class Node:
    """A worker that records the numbers of the items which it gets."""

    def __init__(self, name: str) -> None:
        self.gateway = SimpleNamespace(id=name)
        self.shutting_down = False
        self.items: list[int] = []

    def send_runtest_some(self, indices: list[int]) -> None:
        self.items += indices

    def shutdown(self) -> None:
        self.shutting_down = True


def shares(pytester: pytest.Pytester, properties: list[str]) -> list[list[str]]:
    """Returns the properties that each of two workers gets, in order."""
    return [list(dict.fromkeys(map(property_of, items))) for items in items_of(pytester, properties)]


def items_of(
    pytester: pytest.Pytester,
    properties: list[str],
    labels: tuple[str, ...] = ("w1-0", "w2-0", "w3-0", "audit"),
    *,
    has_budget: bool = False,
) -> list[list[str]]:
    """Returns the items that each of two workers gets, in order."""
    items = [f"test_it.py::{name}[{label}]" for label in labels for name in properties]
    config = pytester.parseconfig("-p", "xdist", "-n2", "--tx=2*popen")
    scheduling = PropertyScheduling(config, None, has_budget=has_budget)
    nodes = [Node("a"), Node("b")]
    for node in nodes:
        scheduling.add_node(node)
        scheduling.add_node_collection(node, items)
    scheduling.schedule()
    done = 0
    while scheduling.has_pending:
        for node in nodes:
            if done < len(items) and node.items[done:]:
                scheduling.mark_test_complete(node, node.items[done])
        done += 1
    return [[items[index] for index in node.items] for node in nodes]


def test_all_items_of_a_property_run_in_one_worker(pytester: pytest.Pytester) -> None:
    first, second = shares(pytester, list("abcdefgh"))
    assert first and second and not set(first) & set(second)


def test_few_properties_are_divided_among_the_workers(pytester: pytest.Pytester) -> None:
    first, second = shares(pytester, ["a"])
    assert first == second == ["test_it.py::a"]


def test_known_failures_of_a_subject_run_in_one_worker() -> None:
    assert property_of("known_failures::scale::2") == property_of("known_failures::scale::1")


@pytest.mark.parametrize("nodeid", ["test_it.py::a[w2-0]", "test_it.py::a[w2-calls-3]", "test_it.py::a[audit]"])
def test_searches_and_the_audit_of_a_property_run_in_one_worker(nodeid: str) -> None:
    assert property_of(nodeid) == "test_it.py::a"


def test_parametrized_test_is_divided_among_the_workers() -> None:
    assert property_of("test_it.py::test_a[0-w2]") == "test_it.py::test_a[0-w2]"


def test_costliest_property_runs_first(pytester: pytest.Pytester) -> None:
    first, _ = shares(pytester, [*"abcdefgh", "fsdp2_tp_mlp"])
    assert first[0] == "test_it.py::fsdp2_tp_mlp"


def test_searches_that_enumerate_calls_are_divided_among_the_workers(pytester: pytest.Pytester) -> None:
    labels = tuple(f"w2-calls-{number}" for number in range(9))
    first, second = items_of(pytester, [*"abcdefgh", "dtensor_operators"], ("w1-0", *labels))
    calls_of_one = [{item for item in items if "dtensor_operators[w2-calls" in item} for items in (first, second)]

    assert all(calls_of_one) and not calls_of_one[0] & calls_of_one[1]


def test_items_of_a_run_with_a_budget_keep_their_order(pytester: pytest.Pytester) -> None:
    labels = ("w2-0", "w4-0", "audit")
    by_worker = items_of(pytester, ["every_optimizer", "dtensor_operators", *"abcdefgh"], labels, has_budget=True)

    assert all(len(items) >= 10 for items in by_worker)
    for items in by_worker:
        places = [labels.index(item.partition("[")[2].rstrip("]")) for item in items]
        assert places == sorted(places)


def test_searches_of_a_run_with_a_budget_are_ordered_by_ranks_and_by_the_time_to_begin() -> None:
    searches = [
        (f"test_it.py::{name}[w{size}-0]", size) for name in ("every_optimizer", "a") for size in (1, 2, 3, 4, 8)
    ]
    ordered = sorted(searches, key=lambda search: order_in_budget(*search))

    assert [size for _, size in ordered] == [2, 2, 4, 4, 3, 3, 8, 8, 1, 1]
    assert ["::a[" in name for name, _ in ordered] == [True, False] * 5
    assert weight_in_budget(*ordered[0]) > weight_in_budget(*ordered[2])
