"""Names of parts and tensors under wrappers equal the names in the unsharded module."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from equivtest.programs.boundaries import parts_of
from equivtest.programs.case import ModuleCase
from equivtest.programs.names import by_own_name
from equivtest.programs.reference import call_builder
from equivtest.ranks.pool import Pool
from equivtest.verdicts.judging import check
from equivtest.verdicts.verdict import ValueMismatch
from tests.programs.wrapped import Around

HERE = "tests.programs.wrapped:"
Wrap = Callable[[nn.Module], nn.Module]


def in_part(module: nn.Module) -> nn.Module:
    module.inner = nn.DataParallel(module.inner)  # type: ignore[arg-type]
    return module


def moved(module: nn.Module) -> nn.Module:
    return nn.ModuleDict({"first": module.inner, "last": module.module})  # type: ignore[dict-item]


@pytest.mark.parametrize(
    "wrap",
    [nn.DataParallel, in_part, Around, lambda it: Around(nn.DataParallel(it)), lambda it: Around(in_part(it)), moved],
    ids=["whole", "part", "own wrapper", "around a wrapper", "around a wrapped part", "moved"],
)
def test_buffers_and_submodules_within_a_wrapper_keep_their_names(wrap: Wrap) -> None:
    whole = call_builder(HERE + "Normed")
    names = {"inner.1.running_mean", "inner.1.running_var", "inner.1.num_batches_tracked"}

    wrapped = wrap(whole)

    assert by_own_name(wrapped, wrapped.named_buffers()).keys() == names
    assert {"inner", "inner.0", "inner.1", "module"} <= {name for name, _ in parts_of(wrapped)}


@pytest.mark.parametrize(
    ("wrapped", "own"),
    [
        (Around(nn.Linear(2, 2)), "held.weight"),
        (nn.DataParallel(nn.Linear(2, 2)), "weight"),
        (nn.Sequential(nn.DataParallel(nn.Linear(2, 2))), "0.weight"),
        (nn.Sequential(checkpoint_wrapper(nn.Linear(2, 2))), "0.weight"),
        (nn.Sequential(nn.ModuleDict({"module": nn.Linear(2, 2)})), "0.module.weight"),
    ],
    ids=["own wrapper", "whole", "part", "checkpointed", "no wrapper"],
)
def test_tensors_of_an_unknown_module_are_named_without_wrappers(wrapped: nn.Module, own: str) -> None:
    assert own in by_own_name(wrapped, wrapped.named_parameters())


@pytest.mark.ranks
@pytest.mark.parametrize("parallelize", ["whole", "parts", "around", "around_parts", "flattened"])
def test_running_statistics_of_a_module_within_wrappers_are_judged(pool: Pool, parallelize: str) -> None:
    verdicts = check("module", case_of(parallelize), pool)

    assert {verdict.kind for verdict in verdicts} == {"holds"}


@pytest.mark.ranks
def test_message_names_a_wrong_submodule_within_a_wrapper(pool: Pool) -> None:
    with pytest.raises(ValueMismatch, match=r"module: boundary\.inner\.0 differs"):
        check("module", case_of("wrong_in_around_parts", by_parts=True), pool)


def case_of(parallelize: str, *, by_parts: bool = False) -> ModuleCase:
    axes = {"axes": ("dp", "sp"), "mesh": (2, 1)} if parallelize == "flattened" else {}
    return ModuleCase(
        world_size=2,
        build=HERE + "Normed",
        parallelize=HERE + parallelize,
        x_shape=(8, 3),
        batch="mean of parts",
        values=(("real", 0),),
        dtype="float32" if by_parts else "float64",
        by_parts=by_parts,
        **axes,  # type: ignore[arg-type]
    )
