"""Limits of older releases of torch, and known failures of a collective that a probe finds wrong."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

import pytest

from equivtest.base.lacking import is_allowed
from equivtest.base.refusal import is_missing
from equivtest.pytest_plugin.pools import is_known_fault
from equivtest.pytest_plugin.settings import Settings
from equivtest.ranks.support import Finding

ENTRY = """
[[known_failure]]
subject = "collectives"
claim = "equals_unsharded"
kind = "value"
where = [["collectives", "==", ["reduce_scatter_tensor_avg"]], ["world_size", ">", 1]]
case = "CollectivesCase(world_size=2, collectives=('reduce_scatter_tensor_avg',))"
reason = "the sum comes back"
"""


@pytest.mark.parametrize(("installed", "expected"), [("2.8.0+cu128", True), ("2.13.0+cpu", False), ("2.15.0", False)])
def test_missing_sharding_strategy_counts_as_unsupported_only_in_an_old_torch(
    installed: str, *, expected: bool
) -> None:
    error = NotImplementedError("Operator aten.foo.default does not have a sharding strategy registered.")

    assert is_missing(error, installed) == expected


def test_error_other_than_a_missing_strategy_is_a_failure_in_an_old_torch() -> None:
    assert not is_missing(RuntimeError("does not have a sharding strategy registered"), "2.8.0")
    assert not is_missing(NotImplementedError("no kernel"), "2.8.0")


@pytest.mark.parametrize(
    ("installed", "backend", "allowed", "expected"),
    [
        ("2.8.0+cu128", "gloo", {"release"}, True),
        ("2.13.0+cpu", "gloo", {"release"}, False),
        ("2.8.0+cu128", "fake", {"release"}, False),
        ("2.8.0+cu128", "gloo", {"float16"}, False),
    ],
)
def test_allow_unsupported_release_excuses_a_gloo_refusal_only_in_an_old_torch(
    monkeypatch: pytest.MonkeyPatch, installed: str, backend: str, allowed: set[str], *, expected: bool
) -> None:
    monkeypatch.setattr(metadata, "version", {"torch": installed}.__getitem__)
    settings = Settings(backend=backend, allowed=frozenset(allowed))

    assert is_allowed(("float32:all_to_all",), settings.excused) == expected


@pytest.mark.parametrize(
    ("collective", "kind", "expected"),
    [
        ("reduce_scatter_tensor_avg", "wrong", True),
        ("reduce_scatter_tensor_avg", "hung", False),
        ("reduce_scatter_tensor", "wrong", False),
        ("all_reduce_avg", "wrong", False),
    ],
)
def test_probed_fault_is_excused_only_if_a_list_of_known_failures_contains_it(
    tmp_path: Path, collective: str, kind: str, *, expected: bool
) -> None:
    path = tmp_path / "known.toml"
    path.write_text(ENTRY)
    fault = Finding(collective, "float32", 2, kind, "rank 0: expected 1, got 2")  # type: ignore[arg-type]

    assert is_known_fault(fault, Settings(known_failures=(str(path),))) == expected
