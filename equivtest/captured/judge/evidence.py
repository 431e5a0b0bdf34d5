"""Collects the data for a verdict on a captured run: the run as a case, expected values, the ranks' tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from equivtest.base import limits
from equivtest.captured.format.folder import CapturedRank, CapturedRun
from equivtest.captured.format.manifest import Manifest
from equivtest.cases.case import Shape, require
from equivtest.layout import UNTOLD, Layout, Replicate, coordinate_of
from equivtest.oracle.expected import Expected
from equivtest.oracle.held import Held, put_together
from equivtest.programs.boundaries import is_boundary
from equivtest.programs.captured import CapturedCase
from equivtest.programs.case import WHOLE, ModuleCase, cotangent_of
from equivtest.programs.inputs import BATCH, IGNORED, REAL
from equivtest.programs.micro_batches import at_micro_batch
from equivtest.programs.oracle.accumulated import MicroBatch, expect_accumulated
from equivtest.programs.outputs import OUTPUT
from equivtest.programs.reference import call_builder
from equivtest.tensors import Placed, dtype_name, same_bits
from equivtest.verdicts.message import few

GIVEN, BEFORE, COTANGENT = "given.", "before.", "cotangent"


class Evidence(NamedTuple):
    """Everything on which a verdict about a captured run depends.

    Attributes:
        observed: Tensors of each rank, in the form in which a rank that equivtest starts returns them.
        inputs: Unsharded inputs, parameters and cotangents. For an update, also the optimizer's state.
    """

    case: ModuleCase
    expected: Expected
    observed: Held
    inputs: Mapping[str, torch.Tensor]


def forwards_in(run: CapturedRun, reference: str) -> Evidence:
    """Collects the evidence from all micro-batches.  Raises Misuse for files that no run can have written."""
    micro_batches = [_micro_batch(each, reference) for each in run.micro_batches()]
    case = micro_batches[0].case.with_further([each.case for each in micro_batches[1:]])
    observed = {rank: _joined(micro_batches, [each.held[rank] for each in micro_batches]) for rank in run.ranks}
    inputs = _joined(micro_batches, [each.given for each in micro_batches])
    return Evidence(case, expect_accumulated(micro_batches), observed, inputs)


def _joined(micro_batches: Sequence[MicroBatch], tensors: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Joins the tensors of all micro-batches in one dict, in which 'given.ids' of the second is 'micro2.given.ids'.

    All micro-batches share the tensors of parameters, so each of these tensors is in the dict once.
    """
    return {
        at_micro_batch(number, name): tensor
        for number, (each, own) in enumerate(zip(micro_batches, tensors, strict=True), 1)
        for name, tensor in own.items()
        if number == 1 or not each.case.is_of_all(name)
    }


def _micro_batch(run: CapturedRun, reference: str) -> MicroBatch:
    inputs = {name: _input(run, name) for name in run.manifest.inputs}
    case = _case_of(run, reference, inputs)
    _require_same_roots(run, case)
    observed = {rank: _answers(case, each) for rank, each in run.ranks.items()}
    tensors = {
        name: torch.cat(shares) if name in case.divided_names() else shares[0] for name, shares in inputs.items()
    }
    for name in case.parameter_names():
        shape = case.facts.parameters[name].shape
        tensors[name] = unsharded(run, observed, f"param.{name}", shape, f"parameter {name}")
    tensors |= {cotangent_of(name): _cotangent(run, case, name) for name in case.started}
    return MicroBatch(case, tensors, observed, _buffers(run, case))


def _case_of(run: CapturedRun, reference: str, inputs: Mapping[str, list[torch.Tensor]]) -> CapturedCase:
    manifest, shares = run.manifest, len(_ranks_by_share(run.manifest))
    require(bool(inputs), f"{run.folder}: the captured model was called without a tensor, so there is nothing to judge")
    rows = _num_rows(manifest, inputs)
    described: list[tuple[str, str, tuple[int | str, ...]]] = []
    sizes: tuple[tuple[str, int], ...] = ()
    for name, (first, *others) in inputs.items():
        shape: tuple[int | str, ...] = tuple(first.shape)
        if rows is not None and shape and shape[0] == rows:
            shape, sizes = (BATCH, *shape[1:]), ((BATCH, rows * shares),)
        else:
            require(
                all(same_bits(first, other) for other in others),
                f"{run.folder}: input {name} has different values on the ranks, so its first dim must be the {rows} "
                f"rows of the batch, got shape {tuple(first.shape)}",
            )
        described.append((name, _kind_of(first), shape))
    return CapturedCase(
        **fields_of(run, reference),
        inputs=tuple(described),
        sizes=sizes,
        positional=manifest.positional,
        outputs=manifest.outputs,
        batch=manifest.batch,
        batch_axis=manifest.batch_axis,
        started=_roots(run.ranks[0]),
        with_gradient=tuple(name for name in inputs if run.ranks[0].entry(GIVEN + name).requires_grad),
    )


def _num_rows(manifest: Manifest, inputs: Mapping[str, list[torch.Tensor]]) -> int | None:
    """Returns the number of rows of the batch on each rank, or None if each rank has the whole batch.

    The rows are dim 0 of the first input that differs between ranks.  If no input differs, they are dim 0 of the first
    input with dims.
    """
    if manifest.batch == WHOLE:
        return None
    candidates = [shares for shares in inputs.values() if shares[0].dim()]
    differing = [shares for shares in candidates if not all(same_bits(shares[0], share) for share in shares)]
    require(bool(candidates), "the ranks divide the batch along the first dim of an input, but no input has a dim")
    rows = {share.shape[0] for share in (*differing, *candidates)[0]}
    require(len(rows) == 1, f"all ranks must have the same number of rows, got {sorted(rows)}")
    return rows.pop()


def _kind_of(tensor: torch.Tensor) -> str:
    """Returns the kind of input that a case declares for a tensor with these values, such as 'ids(8)'."""
    if tensor.is_floating_point():
        return REAL
    if tensor.dtype == torch.bool or not tensor.numel():
        return "mask"
    smallest, largest = int(tensor.min()), int(tensor.max())
    return f"ids({largest + 1})" if smallest >= 0 else f"targets({max(largest, 0) + 1}, {IGNORED})"


def _roots(rank: CapturedRank) -> tuple[str, ...]:
    """Returns the outputs of a rank to which a gradient came from outside of the model."""
    return tuple(OUTPUT + name.removeprefix(COTANGENT) for name in rank if name.split(".")[0] == COTANGENT)


def _require_same_roots(run: CapturedRun, case: CapturedCase) -> None:
    """Raises Misuse unless on all ranks the gradient came to the same outputs, and the reference has these outputs."""
    for number, rank in run.ranks.items():
        roots = _roots(rank)
        require(
            roots == case.started,
            f"{run.folder}: all ranks must begin backward at the same outputs, got "
            f"{', '.join(case.started) or 'none'} on rank 0, "
            f"{', '.join(roots) or 'none'} on rank {number}",
        )
    require(bool(case.started), f"{run.folder}: no output has a gradient: call backward within the block")
    unknown = [name for name in case.started if name not in case.facts.outputs]
    require(not unknown, f"{run.folder}: the run's model returns {''.join(unknown[:1])}, but {case.build} does not")


def _ranks_by_share(manifest: Manifest) -> list[list[int]]:
    """Returns, for each part of a divided batch, the ranks that have the rows of the part."""
    if manifest.batch == WHOLE:
        return [list(range(manifest.world_size))]
    axis = manifest.axes.index(manifest.batch_axis) if manifest.batch_axis in manifest.axes else 0
    shares: list[list[int]] = [[] for _ in range(manifest.mesh[axis])]
    for rank in range(manifest.world_size):
        shares[coordinate_of(rank, manifest.mesh)[axis]].append(rank)
    return shares


def _of_share(
    run: CapturedRun, ranks: list[int], name: str, what: str, shape: Shape | None = None
) -> tuple[torch.Tensor, list[int]]:
    """Reads tensor `name` from `ranks`, which have the same rows of the batch.

    Args:
        what: Description of the tensor, for messages.
        shape: Shape of the whole tensor, used if the run's files do not have it.

    Returns:
        (tensor, ranks). If `ranks` are all ranks of the run and have shards, the tensor is the unsharded one, and the
            returned list is empty. Otherwise the tensor is the tensor of the first of `ranks`, and the list has the
            ranks whose values differ from that tensor.
    """
    placed = {rank: _read(run, rank, name) for rank in ranks}
    first = placed[ranks[0]]
    if len(ranks) == len(run.ranks) and first.layout != UNTOLD and not _is_replicated(first.layout):
        shards = {rank: {name: each} for rank, each in placed.items()}
        return unsharded(run, shards, name, shape or first.global_shape or (), what), []
    return first.local, [rank for rank, each in placed.items() if not same_bits(first.local, each.local)]


def _read(run: CapturedRun, rank: int, name: str) -> Placed:
    require(
        name in run.ranks[rank], f"{run.folder}: rank {rank} did not write tensor {name}, which every rank must write"
    )
    return run.ranks[rank][name]


def _is_replicated(layout: Layout) -> bool:
    return all(isinstance(placement, Replicate) for placement in layout.placements)


def _input(run: CapturedRun, name: str) -> list[torch.Tensor]:
    shares = []
    for ranks in _ranks_by_share(run.manifest):
        share, differing = _of_share(run, ranks, GIVEN + name, f"input {name}")
        require(
            not differing,
            f"{run.folder}: ranks {ranks[0]} and {''.join(map(str, differing[:1]))} got different values of input "
            f"{name}, but with batch={run.manifest.batch!r} they must get the same: if each rank has its own rows, "
            "pass batch='mean of parts' to capture",
        )
        shares.append(share)
    return shares


def _cotangent(run: CapturedRun, case: CapturedCase, output: str) -> torch.Tensor:
    """Returns the gradient that came to an output from outside of the model, for the rows of the whole batch.

    If the output is a number, the result has one element for each part of the batch.
    """
    name, shape = cotangent_of(output), case.shapes()[output]
    shares = []
    for ranks in _ranks_by_share(run.manifest):
        share, differing = _of_share(run, ranks, name, f"the gradient of {output}", shape)
        first = _read(run, ranks[0], output).local
        is_same = all(same_bits(first, _read(run, rank, output).local) for rank in ranks)
        require(
            not (is_same and differing),
            f"{run.folder}: ranks {ranks[0]} and {''.join(map(str, differing[:1]))} have the same output {output}, but "
            "begin backward from different gradients of it, so their losses differ: say how the loss divides the "
            "batch, capture(batch=)",
        )
        shares.append(share)
    whole = torch.cat([each if each.dim() else each.reshape(1) for each in shares]) if case.is_divided else shares[0]
    require(
        tuple(whole.shape) == tuple(shape),
        f"{run.folder}: the gradient of {output} has shape {tuple(whole.shape)}, but {output} of {case.build} has "
        f"{tuple(shape)}",
    )
    return whole


def _buffers(run: CapturedRun, case: CapturedCase) -> list[dict[str, torch.Tensor]]:
    """Returns the captured buffers by name, for each part of the batch.  They replace the buffers from the builder.

    Raises:
        Misuse: the buffers belong to another model, or parts have different values of a buffer that the forward only
            reads.
    """
    built = dict(call_builder(case.build).named_buffers())
    shares: list[dict[str, torch.Tensor]] = []
    for ranks in _ranks_by_share(run.manifest):
        rank = run.ranks[ranks[0]]
        buffers = {name: rank[BEFORE + name].local for name in built if BEFORE + name in rank}
        for name, buffer in buffers.items():
            require(
                buffer.shape == built[name].shape and buffer.is_floating_point() == built[name].is_floating_point(),
                f"{run.folder} is of another model than {case.build}: buffer {name} has shape {tuple(buffer.shape)} "
                f"in the run, but {tuple(built[name].shape)} in the reference",
            )
        for name in buffers.keys() - case.facts.buffers.keys():
            require(
                not shares or (name in shares[0] and same_bits(shares[0][name], buffers[name])),
                f"{run.folder}: ranks 0 and {ranks[0]} have different values of buffer {name}, which the forward only "
                "reads, so they run different models: make the buffer the same on all ranks",
            )
        shares.append(buffers)
    return shares


def _answers(case: CapturedCase, rank: CapturedRank) -> dict[str, Placed]:
    """Returns a captured rank's tensors in the form in which a subject returns them."""
    names, stacked, layouts = set(case.answer_names()), set(case.stacked_names()), case.layouts()
    answers = {}
    for name in filter(names.__contains__, rank):
        placed = rank.placed(name, UNTOLD if is_boundary(name) else layouts[name])
        says_all = all(rank.entry(name).layout)
        if is_boundary(name) and (case.is_divided or not says_all):
            answers[name] = Placed(placed.local.unsqueeze(0) if case.is_divided else placed.local, UNTOLD)
        elif name in stacked:
            answers[name] = Placed(placed.local.unsqueeze(0), layouts[name])
        elif says_all or not _is_replicated(placed.layout) or name.startswith(("param.", "grad.")):
            answers[name] = placed
        else:
            answers[name] = Placed(placed.local, layouts[name])
    return answers


def fields_of(run: CapturedRun, reference: str) -> dict[str, Any]:
    manifest = run.manifest
    dtypes = sorted({parameter.dtype for parameter in manifest.parameters.values()})
    require(
        len(dtypes) == 1 and dtypes[0] in limits.DTYPES,
        f"{run.folder}: parameters have dtypes {' and '.join(dtypes) or 'none'}, but all must have one dtype of "
        f"{', '.join(limits.DTYPES)}",
    )
    axes = manifest.axes or (("first", "second") if len(manifest.mesh) > 1 else ())
    return {
        "world_size": manifest.world_size,
        "dtype": dtypes[0],
        "build": reference,
        "parallelize": f"what ran in {run.folder}",
        "axes": axes,
        "mesh": manifest.mesh if axes else (),
        "values": ((REAL, 0),),
        "by_parts": True,
        "poison": "none",
    }


def unsharded(run: CapturedRun, observed: Held, name: str, shape: Shape, what: str = "") -> torch.Tensor:
    """Assembles the unsharded tensor `name`.  Raises Misuse if a shard is missing or the shards do not fit."""
    tensor = put_together(observed, name, shape, run.manifest.mesh)
    shards = [f"rank {rank} {_in_words(tensors.get(name))}" for rank, tensors in observed.items()]
    require(
        tensor is not None,
        f"{run.folder}: the ranks' parts of {what or name} do not make up a tensor of shape {shape}: {few(shards)}",
    )
    assert tensor is not None
    return tensor


def _in_words(placed: Placed | None) -> str:
    if placed is None:
        return "has none"
    return f"{tuple(placed.local.shape)} {dtype_name(placed.local.dtype)} {placed.layout}"
