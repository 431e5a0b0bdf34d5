"""The map of torch's parallel surface: its names, and what counts as a call."""

from __future__ import annotations

from fnmatch import fnmatchcase
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor import Shard

from studies.surface import NO_NUMBERS, PAGE, Tracer, public_names, reason_of

NAMES = {name for names in public_names().values() for name in names}


def test_map_of_torchs_names_has_every_name_of_the_installed_torch() -> None:
    rows = PAGE.read_text(encoding="utf-8").split("| `")

    assert NAMES - {row.partition("`")[0] for row in rows} == set()


@pytest.mark.parametrize("pattern", [pattern for patterns in NO_NUMBERS.values() for pattern in patterns])
def test_every_pattern_for_functions_without_tensors_matches_a_torch_name(pattern: str) -> None:
    assert any(fnmatchcase(name, pattern) for name in NAMES)


def test_all_reduce_is_listed_as_computing_a_tensor() -> None:
    assert reason_of("torch.distributed.all_reduce") == ""


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (lambda: F.mse_loss(torch.ones(2), torch.ones(2)), "torch.nn.functional.mse_loss"),
        (lambda: F.linear(torch.ones(2, 2), torch.ones(2, 2)), "torch.nn.functional.linear"),
        (lambda: F.max_pool1d(torch.ones(1, 4), 2), "torch.nn.functional.max_pool1d"),
        (lambda: torch.nn.ReLU()(torch.ones(2)), "torch.nn.ReLU"),
        (lambda: torch.optim.SGD([torch.ones(2)], lr=1.0), "torch.optim.SGD"),
        (lambda: Shard.local_shard_size_and_offset(5, 2, 0), "torch.distributed.tensor.Shard"),
    ],
    ids=["function", "built-in", "dispatched by a flag", "module", "optimizer", "class"],
)
def test_tracer_writes_the_name_of_the_called_function(function, name: str, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    Tracer(tmp_path).run("program", function)

    [file] = tmp_path.iterdir()
    assert f"{name} program" in file.read_text().splitlines()


def test_tracer_writes_no_name_of_a_function_that_is_not_called(tmp_path: Path) -> None:
    Tracer(tmp_path).run("program", lambda: F.mse_loss)

    assert list(tmp_path.iterdir()) == []
