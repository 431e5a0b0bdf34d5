"""`equivtest.check` and `.check` of a property: judged at once, without pytest."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import equivtest
from equivtest import CheckFailed, check, program
from equivtest.base.functions import load_file
from equivtest.errors import Inconclusive, Misuse
from equivtest.programs import checking
from equivtest.programs.case import ModuleCase
from equivtest.programs.checking import Result
from equivtest.ranks.pool import Pool

SHAPES = [(2, 3), (4, 3)]
ON_TWO: dict[str, Any] = {"world_sizes": (2,), "dtypes": ("float32",)}


def block() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 2))


def replicated(module: nn.Module, mesh: Any, *, forgets: str = "") -> nn.Module:
    if forgets:
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, [forgets])
    return DistributedDataParallel(module, process_group=mesh.get_group())


@pytest.fixture(autouse=True)
def shared(pool: Pool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Checks take the pool of all tests; replay files go to a folder of the test."""
    monkeypatch.setitem(checking._pools, pool.backend, pool)
    monkeypatch.chdir(tmp_path)


@pytest.mark.ranks
def test_result_of_a_right_program_is_ok() -> None:
    result = check(block, replicated, SHAPES, **ON_TWO, audit=False)

    assert result
    assert result.ok
    assert result.claims["gradients_equal_unsharded"] == "holds"
    assert not result.failures
    assert "holds: equals_unsharded, gradients_equal_unsharded" in str(result)


@pytest.mark.ranks
def test_result_is_not_ok_if_the_audit_finds_an_unseen_collective(monkeypatch: pytest.MonkeyPatch) -> None:
    blind = SimpleNamespace(problem="no claim sees all_reduce", waits="")
    monkeypatch.setattr(checking, "audit_property", lambda *args: SimpleNamespace(as_data=lambda name: blind))

    result = check(block, replicated, SHAPES, **ON_TWO)

    assert not result.ok
    assert "repeats_itself: shows nothing: no claim sees all_reduce" in str(result)


@pytest.mark.ranks
def test_check_failed_exception_has_the_message_of_the_first_failure() -> None:
    prop = program(block, replicated, SHAPES, options={"forgets": ("", "0.bias")})

    with pytest.raises(CheckFailed, match=r"^ValueMismatch: module: grad.0.bias differs from the oracle\n") as raised:
        prop.check(**ON_TWO, audit=False, raises=True)

    result = raised.value.result
    assert not result
    assert result.claims["gradients_equal_unsharded"] == "fails"
    assert str(result) == repr(result) == str(raised.value)
    assert "replicated(forgets='0.bias')" in result.failures[0].case


@pytest.mark.ranks
def test_check_judges_the_new_code_of_a_changed_file_after_a_reload(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    file = tmp_path / "models_at_a_prompt.py"
    for size in (2, 30):  # Python takes the old bytecode of a file with the same length and the same second of change
        file.write_text(
            f"from torch import nn\nfrom torch.nn.parallel import DistributedDataParallel\n"
            f"def block(): return nn.Linear(3, {size})\n"
            "def replicated(module, mesh): return DistributedDataParallel(module, process_group=mesh.get_group())\n"
        )
        sys.modules.pop("models_at_a_prompt", None)
        importlib.invalidate_caches()
        models = load_file(str(file))

        result = check(models.block, models.replicated, SHAPES, **ON_TWO, audit=False)

        names = {name: f"models_at_a_prompt.py:{name}" for name in ("block", "replicated")}
        case = ModuleCase(world_size=2, build=names["block"], parallelize=names["replicated"], x_shape=(2, 3))
        assert result.ok
        assert case.facts.parameters["weight"].shape == (size, 3)
    sys.modules.pop("models_at_a_prompt")


def test_check_refuses_a_file_that_changed_after_its_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    file = tmp_path / "edited.py"
    file.write_text("def block(): ...\n")
    models = load_file(str(file))
    checking._require_fresh((models.block,))

    os.utime(file, ns=(0, 0))

    with pytest.raises(Misuse, match=r"edited.py has changed since it was imported: call importlib.reload\(edited\)"):
        checking._require_fresh((models.block,))


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"world_sizes": 2}, "world_sizes must be numbers of ranks, 1 to "),
        ({"world_sizes": (0,)}, "world_sizes must be numbers of ranks, 1 to "),
        ({"world_sizes": ()}, "world_sizes must be numbers of ranks, 1 to "),
        ({"dtypes": "float32"}, "dtypes must hold names, such as ('float32',), got 'float32'"),
        ({"dtypes": ("float23",)}, "dtypes: there is no 'float23': did you mean 'float32'?"),
        ({"profile": "gates"}, "profile: there is no 'gates': did you mean 'gate'?"),
        ({"profile": "soak"}, "profile: there is no 'soak': did you mean 'smoke'?"),
        ({"world_size": 2}, "check has no argument 'world_size': did you mean world_sizes=?"),
        (
            {"world": equivtest.World(world_sizes=(3,)), "world_sizes": (2,)},
            "the program runs only on (3,) ranks, but world_sizes=",
        ),
    ],
)
def test_error_for_a_misspelt_setting_suggests_the_right_name(wrong: Any, said: str) -> None:
    with pytest.raises(Misuse) as raised:
        check(block, replicated, SHAPES, **wrong)

    assert str(raised.value).startswith(said)


def test_calling_check_within_a_rank_raises_misuse(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checking, "is_rank", lambda: True)

    with pytest.raises(Misuse, match="put that below if __name__ == '__main__':, or into a test"):
        check(block, replicated, SHAPES)


@pytest.mark.parametrize(
    ("claims", "ok"),
    [
        ({"a": "holds"}, True),
        ({"a": "holds", "b": "open"}, True),
        ({"a": "open"}, False),
        ({"a": "holds", "b": "fails"}, False),
        ({"a": "known failure"}, False),
        ({}, False),
    ],
)
def test_result_is_true_only_if_a_claim_holds_and_none_fails(claims: dict[str, str], ok: bool) -> None:  # noqa: FBT001
    assert bool(Result(claims, (), 1)) is ok


def test_check_with_raises_true_raises_if_no_claim_is_conclusive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checking, "_judged", lambda *args, **settings: Result({"a": "open"}, (), 1, ("a: not run",)))

    with pytest.raises(Inconclusive, match="open: a\na: not run"):
        check(block, replicated, SHAPES, raises=True)


def test_equivtest_check_is_a_function_rather_than_a_module() -> None:
    assert importlib.util.find_spec("equivtest.check") is None
    assert equivtest.check is check
