"""Checks the contract of buffers that the forward changes.

There are two contracts. Under 'own rows', such buffers depend on a rank's own rows. Under 'whole batch', they depend on
the whole batch.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from equivtest.cases.case import require
from equivtest.errors import PropertyMisuse
from equivtest.programs.reference import Program, call, call_builder, facts_of, in_dtype, made_inputs

if TYPE_CHECKING:
    from equivtest.programs.case import ModuleCase

STATES = ("own rows", "whole batch")
"""Values of `Judge.state`: buffers after a forward depend on a rank's own rows, or on the whole batch."""

OWN_ROWS, WHOLE_BATCH = STATES

OWN_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
"""Modules whose statistics cover a rank's own rows, by their documentation.

Source: torch.nn.parallel.DistributedDataParallel, torch.nn.SyncBatchNorm.convert_sync_batchnorm (2.13.0).
"""

NUM_SEEDS = 2


def require_state(case: ModuleCase) -> None:
    """Checks that the contract of the buffers fits the case, and that the case has a contract if it needs one.

    A case needs a contract if the two possible contracts differ.

    Raises:
        Misuse: The contract does not fit the module's inputs and outputs.
        PropertyMisuse: The case names no contract, and the two contracts differ.
    """
    if case.training.step:
        require(
            case.judge.state != OWN_ROWS,
            f"{case.training.step}: in a step the buffers must follow the rows of the whole batch, got "
            f"state={OWN_ROWS!r}: omit state=, or judge one forward and backward with batch='mean of parts' and "
            "without a step",
        )
    elif case.judge.state == WHOLE_BATCH:
        outputs = [name for name in case.facts.outputs if name not in case.outputs_with_rows()]
        inputs = [name for name in case.real_names() if name not in case.divided_names()]
        require(
            not outputs and not inputs,
            f"{case.build}: with state={WHOLE_BATCH!r}, the first dim of {', '.join(outputs + inputs)} must be the "
            "rows of the batch, because without rows one rank's value differs from the value of the whole batch: name "
            "other outputs, such as Judge(outputs=('logits',)), or write a step, which returns values of the whole "
            "batch",
        )
    elif case.judge.state == "" and case.num_parts > 1 and case.facts.buffers:
        _require_same_state(case)


def _require_same_state(case: ModuleCase) -> None:
    """Checks that a forward on some rows leaves the same values in the buffers as a forward on the whole batch."""
    whole = case.program_of(case.num_rows)
    parts = [case.program_of(size) for size in sorted({1, *case.rows})]
    for name in (name for part in parts for name in differing_buffers(part, whole, case.row_names())):
        raise PropertyMisuse(unnamed(f"{case.build}: buffer {name} follows the rows of the batch"))


def require_own_norms(case: ModuleCase, parallel: nn.Module) -> None:
    """Raises PropertyMisuse if `state` is not set and the parallel module has a batch norm other than OWN_NORMS.

    The statistics of SyncBatchNorm, and of classes of other libraries that derive from it or from BatchNorm, may cover
    the rows of all ranks.
    """
    if not case.is_divided or case.judge.state or case.num_parts == 1:
        return
    for name, norm in parallel.named_modules():
        if isinstance(norm, _BatchNorm) and type(norm) not in OWN_NORMS and norm.training:
            raise PropertyMisuse(unnamed(f"{case.parallelize}: {name} is a {type(norm).__name__}"))


def unnamed(what: str) -> str:
    return (
        f"{what}, and each rank has its own rows: pass state={OWN_ROWS!r} if each rank's buffers follow its own rows, "
        f"or state={WHOLE_BATCH!r} if every rank's buffers follow the rows of all ranks, like SyncBatchNorm's"
    )


@functools.lru_cache(maxsize=256)
def differing_buffers(part: Program, whole: Program, row_names: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the names of the buffers whose values depend on whether the module ran on some rows or on the batch.

    A buffer is in the result if its value after the first or the last rows differs from its value after the whole
    batch.

    Buffers of OWN_NORMS are left out. If the module does not take the small number of rows in `part`, the result is
    empty.
    """
    num_rows = {name: shape[0] for name, _, shape in part.inputs if name in row_names}
    names = []
    for seed in range(NUM_SEEDS):
        inputs = made_inputs(whole, torch.Generator().manual_seed(seed))
        first = {name: each[: num_rows[name]] if name in num_rows else each for name, each in inputs.items()}
        last = {name: each[-num_rows[name] :] if name in num_rows else each for name, each in inputs.items()}
        try:
            of_parts, of_whole = [_called(part, first), _called(part, last)], _called(whole, inputs)
        except Exception:  # an arbitrary module may raise anything
            return ()
        names += [
            name
            for name in facts_of(whole).buffers
            if not all(_is_same(each.get_buffer(name), of_whole.get_buffer(name)) for each in of_parts)
            and type(of_whole.get_submodule(name.rpartition(".")[0])) not in OWN_NORMS
        ]
    return tuple(dict.fromkeys(names))


def _called(program: Program, inputs: Mapping[str, torch.Tensor]) -> nn.Module:
    module = in_dtype(call_builder(program.build), program.dtype)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        call(module, program.positional, inputs)
    return module


def _is_same(buffer: torch.Tensor, other: torch.Tensor) -> bool:
    return buffer.shape == other.shape and torch.equal(buffer.nan_to_num(), other.nan_to_num())
