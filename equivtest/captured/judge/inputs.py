"""What a captured run was handed: the case that it is, and the whole inputs, buffers and cotangents."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from equivtest.base import limits
from equivtest.captured.format.folder import CapturedRun, RankHeld
from equivtest.captured.format.manifest import Manifest
from equivtest.cases.case import Shape, require
from equivtest.layout import UNTOLD, Layout, Replicate, coordinate_of
from equivtest.oracle.held import Held, put_together
from equivtest.programs.captured import CapturedCase
from equivtest.programs.case import WHOLE, cotangent_of
from equivtest.programs.inputs import BATCH, IGNORED, REAL
from equivtest.programs.outputs import OUTPUT
from equivtest.programs.reference import call_builder
from equivtest.tensors import Placed, dtype_name, same_bits
from equivtest.verdicts.message import few

GIVEN, BEFORE, COTANGENT = "given.", "before.", "cotangent"


def case_of(run: CapturedRun, reference: str) -> tuple[CapturedCase, dict[str, list[torch.Tensor]]]:
    """The case that the run is, and what each part of its batch was handed."""
    told = run.manifest
    inputs = {name: _parts_of(run, name) for name in told.inputs}
    require(bool(inputs), f"{run.folder}: the model was handed no tensor")
    rows = _rows(told, inputs)
    num_parts = len(_ranks_by_part(told))
    written: list[tuple[str, str, tuple[int | str, ...]]] = []
    sizes: tuple[tuple[str, int], ...] = ()
    for name, parts in inputs.items():
        shape: tuple[int | str, ...] = tuple(parts[0].shape)
        if rows is not None and shape and shape[0] == rows:
            shape, sizes = (BATCH, *shape[1:]), ((BATCH, rows * num_parts),)
        else:
            require(
                all(same_bits(parts[0], part) for part in parts),
                f"{run.folder}: input {name} is not the same on all ranks, and has not the batch's rows",
            )
        written.append((name, _kind_of(parts[0]), shape))
    axes = told.axes or (("first", "second") if len(told.mesh) > 1 else ())
    return CapturedCase(
        world_size=told.world_size,
        dtype=dtype_of(run),
        build=reference,
        parallelize=f"what ran in {run.folder}",
        inputs=tuple(written),
        sizes=sizes,
        positional=told.positional,
        outputs=told.outputs,
        batch=told.batch,
        axes=axes,
        mesh=told.mesh if axes else (),
        batch_axis=told.batch_axis,
        values=((REAL, 0),),
        by_parts=True,
        poison="none",
        started=started_in(run.held[0]),
        with_gradient=tuple(name for name in inputs if run.held[0].told(GIVEN + name).requires_grad),
    ), inputs


def dtype_of(run: CapturedRun) -> str:
    found = sorted({each.dtype for each in run.manifest.parameters.values()})
    require(
        len(found) == 1 and found[0] in limits.DTYPES,
        f"{run.folder}: parameters are of {' and '.join(found) or 'no dtype'}: a run is judged whose parameters are of "
        f"one of {', '.join(limits.DTYPES)}",
    )
    return found[0]


def _ranks_by_part(told: Manifest) -> list[list[int]]:
    """The ranks that have the same rows, those of each part of the batch."""
    if told.batch == WHOLE:
        return [list(range(told.world_size))]
    place = told.axes.index(told.batch_axis) if told.batch_axis in told.axes else 0
    parts: list[list[int]] = [[] for _ in range(told.mesh[place])]
    for rank in range(told.world_size):
        parts[coordinate_of(rank, told.mesh)[place]].append(rank)
    return parts


def _parts_of(run: CapturedRun, name: str) -> list[torch.Tensor]:
    """What each part of the batch was handed of an input, which all its ranks must have been handed."""
    found = []
    for ranks in _ranks_by_part(run.manifest):
        placed = {rank: _read(run, rank, GIVEN + name) for rank in ranks}
        first = placed[ranks[0]]
        if first.layout != UNTOLD and not is_whole(first.layout) and len(ranks) == len(run.held):
            held = {rank: {name: each} for rank, each in placed.items()}
            found.append(made_whole(run, held, name, first.global_shape or (), f"input {name}"))
            continue
        differing = [rank for rank, each in placed.items() if not same_bits(first.local, each.local)]
        require(
            not differing,
            f"{run.folder}: ranks {ranks[0]} and {''.join(map(str, differing[:1]))} were handed different {name}, and "
            f"the batch is {run.manifest.batch!r}: where ranks have rows of their own, capture(batch='mean of parts')",
        )
        found.append(first.local)
    return found


def _read(run: CapturedRun, rank: int, name: str) -> Placed:
    require(name in run.held[rank], f"{run.folder}: rank {rank} wrote no {name}, as it must")
    return run.held[rank][name]


def made_whole(run: CapturedRun, held: Held, name: str, shape: Shape, what: str) -> torch.Tensor:
    """What all ranks hold together of one tensor.

    Raises:
        Misuse: their parts do not fit, or a rank has none.
    """
    found = put_together(held, name, shape, run.manifest.mesh)
    parts = [f"rank {rank} {_told(tensors.get(name))}" for rank, tensors in held.items()]
    require(found is not None, f"{run.folder}: the ranks' parts of {what} make no whole of {shape}: {few(parts)}")
    assert found is not None
    return found


def _told(placed: Placed | None) -> str:
    """In words, which part of a tensor a rank holds."""
    if placed is None:
        return "has none"
    return f"{tuple(placed.local.shape)} {dtype_name(placed.local.dtype)} {placed.layout}"


def started_in(held: RankHeld) -> tuple[str, ...]:
    """The outputs to which a gradient came from outside on a rank."""
    return tuple(OUTPUT + name.removeprefix(COTANGENT) for name in held if name.split(".")[0] == COTANGENT)


def is_whole(layout: Layout) -> bool:
    return all(isinstance(placement, Replicate) for placement in layout.placements)


def _rows(told: Manifest, inputs: Mapping[str, list[torch.Tensor]]) -> int | None:
    """The rows of each part of a divided batch: the first dim of the first input that differs between parts, or any."""
    if told.batch == WHOLE:
        return None
    dimmed = [parts for parts in inputs.values() if parts[0].dim()]
    own = [parts for parts in dimmed if not all(same_bits(parts[0], part) for part in parts)]
    chosen = next(iter(own or dimmed), None)
    require(chosen is not None, "of a divided batch each rank has rows, and no input has a dim")
    assert chosen is not None
    rows = {part.shape[0] for part in chosen}
    require(len(rows) == 1, f"a run is judged whose ranks have as many rows each, got {sorted(rows)}")
    return rows.pop()


def _kind_of(tensor: torch.Tensor) -> str:
    """Returns a kind of input that has values like these."""
    if tensor.is_floating_point():
        return REAL
    if tensor.dtype == torch.bool or not tensor.numel():
        return "mask"
    smallest, largest = int(tensor.min()), int(tensor.max())
    return f"ids({largest + 1})" if smallest >= 0 else f"targets({max(largest, 0) + 1}, {IGNORED})"


def cotangent(run: CapturedRun, case: CapturedCase, output: str) -> torch.Tensor:
    """What came to an output from outside, of all parts of the batch one below the other, a number as one row."""
    name, shape = cotangent_of(output), case.shapes()[output]
    found = []
    for ranks in _ranks_by_part(run.manifest):
        placed = {rank: _read(run, rank, name) for rank in ranks}
        first = placed[ranks[0]]
        if first.layout != UNTOLD and not is_whole(first.layout) and not case.is_divided:
            held = {rank: {name: each} for rank, each in placed.items()}
            return made_whole(run, held, name, shape, f"the gradient of {output}")
        agree = all(same_bits(_read(run, ranks[0], output).local, _read(run, rank, output).local) for rank in ranks)
        differing = [rank for rank, each in placed.items() if not same_bits(first.local, each.local)]
        require(
            not (agree and differing),
            f"{run.folder}: ranks {ranks[0]} and {''.join(map(str, differing[:1]))} hold the same {output}, and begin "
            "backward from different gradients of it: each has a loss of its own, which capture(batch=) must say",
        )
        found.append(first.local)
    whole = torch.cat([part if part.dim() else part.reshape(1) for part in found]) if case.is_divided else found[0]
    require(
        tuple(whole.shape) == tuple(shape),
        f"{run.folder}: the gradient of {output} is of shape {tuple(whole.shape)}, {case.build} gives {tuple(shape)}",
    )
    return whole


def buffers(run: CapturedRun, case: CapturedCase) -> list[dict[str, torch.Tensor]]:
    """What takes the place of the reference's buffers, in each part of the batch.

    Raises:
        Misuse: they are another model's, or parts have other values of one that the forward only reads.
    """
    built = dict(call_builder(case.build).named_buffers())
    found: list[dict[str, torch.Tensor]] = []
    for ranks in _ranks_by_part(run.manifest):
        held = run.held[ranks[0]]
        own = {name: held[BEFORE + name].local for name in built if BEFORE + name in held}
        for name, buffer in own.items():
            require(
                buffer.shape == built[name].shape and buffer.is_floating_point() == built[name].is_floating_point(),
                f"{run.folder} is of another model than {case.build}: buffer {name} is of shape {tuple(buffer.shape)} "
                f"in the run, {tuple(built[name].shape)} in the reference",
            )
        for name in own.keys() - case.facts.buffers.keys():
            require(
                not found or (name in found[0] and same_bits(found[0][name], own[name])),
                f"{run.folder}: ranks 0 and {ranks[0]} hold different values of buffer {name}, which the forward only "
                "reads, so that they run different models: make it the same on all ranks",
            )
        found.append(own)
    return found
