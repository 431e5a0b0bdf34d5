"""Lists operators that view, move, join, pick or sort elements."""

from __future__ import annotations

import torch
from torch.nn import functional

from equivtest.cases.case import Shape
from equivtest.families.operators.case_arguments import (
    added_rows,
    expands,
    flattens,
    flips,
    indexed_rows,
    larger_target,
    narrows,
    pads,
    per_dim,
    permutations,
    picked_rows,
    repeats,
    reshapes,
    rolls,
    selects,
    splits,
    squeezes,
    swaps,
    unflattens,
    unsqueezes,
    windows,
    written_rows,
)
from equivtest.families.operators.case_forms import (
    Signature,
    Signatures,
    along,
    dims_of,
    each,
    either,
    indexed,
    joined,
    moved,
)
from equivtest.families.operators.case_operator import DISTINCT, FLOATS, INDEX, Operator, chooses


def _one_k_per_dim(shape: Shape) -> Signatures:
    """Returns signatures of the smallest element for dims from the front, of two of the largest for dims from the end.

    `topk` has a wrong shape if an earlier call had the same dim and another k (finding 125).
    """
    dims = [(dim, 1 if dim >= 0 else min(2, shape[dim]), dim < 0) for dim in dims_of(shape)]
    return tuple(Signature((shape,), (("dim", dim), ("k", k), ("largest", largest))) for dim, k, largest in dims)


def _put_rows(shape: Shape) -> Signatures:
    """Returns signatures of `index_put` that add up rows, and one that replaces a row."""
    if not shape:
        return ()
    added = [Signature((shape, (n,), (n, *shape[1:]))) for n in (1, 2, 3)]
    return (*added, Signature(added[0].shapes, (("accumulate", False),)))


ROWS = (
    chooses("transpose", torch.transpose, moved(swaps)),
    chooses("permute", torch.permute, moved(permutations)),
    chooses("t", torch.t, num_dims=(0, 1, 2)),
    chooses("movedim", lambda x, dim0, dim1: torch.movedim(x, dim0, dim1), moved(swaps)),
    chooses("reshape", torch.reshape, moved(reshapes)),
    chooses("view", lambda x, shape: x.view(shape), moved(reshapes)),
    chooses("flatten", torch.flatten, moved(flattens)),
    chooses("unflatten", torch.unflatten, moved(unflattens)),
    chooses("squeeze", torch.squeeze, moved(squeezes)),
    chooses("squeeze of all dims of one element", lambda x: torch.squeeze(x[None])),
    chooses("squeeze of two dims", lambda x: torch.squeeze(x[None, :, None], (0, 2))),
    chooses("unsqueeze", torch.unsqueeze, moved(unsqueezes)),
    chooses("expand", lambda x, sizes: x.expand(sizes), moved(expands)),
    chooses("repeat", lambda x, repeats: x.repeat(repeats), moved(repeats)),
    chooses("repeat_interleave", torch.repeat_interleave, moved(per_dim("repeats", 2, 1))),
    chooses("tile", lambda x, repeats: torch.tile(x, repeats), moved(repeats)),
    chooses("narrow", torch.narrow, moved(narrows)),
    chooses("select", torch.select, moved(selects)),
    chooses("unbind", torch.unbind, along()),
    chooses(
        "split",
        lambda x, sizes, dim: torch.split(x, list(sizes) if isinstance(sizes, tuple) else sizes, dim),
        moved(splits),
    ),
    chooses("chunk", torch.chunk, moved(per_dim("chunks", 2, 3, 1))),
    chooses(
        "tensor_split",
        lambda x, sections, dim: torch.tensor_split(x, sections, dim),
        moved(per_dim("sections", 2, 3)),
    ),
    chooses("unfold", lambda x, **how: x.unfold(**how), moved(windows)),
    chooses(
        "diagonal",
        torch.diagonal,
        either(each(), each(offset=1), each(offset=-1, dim1=-1, dim2=0)),
        num_dims=(2, 3),
    ),
    chooses("diag_embed", torch.diag_embed, either(each(), each(offset=1), each(dim1=0, dim2=1)), num_dims=(1, 2)),
    chooses("tril", torch.tril, either(each(), each(diagonal=1), each(diagonal=-1)), num_dims=(2, 3)),
    chooses("triu", torch.triu, either(each(), each(diagonal=1), each(diagonal=-1)), num_dims=(2, 3)),
    chooses("flip", torch.flip, moved(flips)),
    chooses("roll", torch.roll, moved(rolls)),
    chooses("rot90", torch.rot90, either(each(), each(k=2), each(k=-1, dims=(1, 0))), num_dims=(2, 3)),
    chooses("nn.functional.pad", functional.pad, moved(pads), num_dims=(1, 2, 3)),
    chooses("cat", lambda *xs, dim: torch.cat(xs, dim), joined(new_dim=False)),
    chooses("stack", lambda *xs, dim: torch.stack(xs, dim), joined(new_dim=True)),
    chooses(
        "index_select",
        lambda x, index, dim: torch.index_select(x, dim, index),
        indexed(same_dims=False),
        kinds=(FLOATS, INDEX),
    ),
    chooses(
        "gather", lambda x, index, dim: torch.gather(x, dim, index), indexed(same_dims=True), kinds=(FLOATS, INDEX)
    ),
    chooses(
        "take_along_dim",
        lambda x, index, dim: torch.take_along_dim(x, index, dim),
        indexed(same_dims=True),
        kinds=(FLOATS, INDEX),
    ),
    chooses(
        "index_fill",
        lambda x, index, dim: torch.index_fill(x, dim, index, 2.0),
        indexed(same_dims=False),
        kinds=(FLOATS, INDEX),
    ),
    chooses(
        "scatter",
        lambda x, index, dim: torch.scatter(x, dim, index, 2.0),
        indexed(same_dims=True),
        kinds=(FLOATS, INDEX),
    ),
    chooses(
        "scatter from a tensor",
        lambda x, index, other, dim: torch.scatter(x, dim, index, other),
        written_rows,
        kinds=(FLOATS, INDEX, FLOATS),
    ),
    Operator(
        "scatter_add",
        lambda x, index, other, dim: torch.scatter_add(x, dim, index, other),
        added_rows,
        kinds=(FLOATS, INDEX, FLOATS),
    ),
    Operator(  # without the gradient of `other`, which torch gathers by a shorter index (finding 41)
        "scatter_add into a larger operand",
        lambda x, index, other, dim: torch.scatter_add(x, dim, index, other.detach()),
        larger_target,
        kinds=(FLOATS, INDEX, FLOATS),
    ),
    Operator(
        "index_add of rows",
        lambda x, index, other, dim, alpha=1: torch.index_add(x, dim, index, other, alpha=alpha),
        indexed_rows,
        kinds=(FLOATS, INDEX, FLOATS),
    ),
    Operator(
        "index_put",
        lambda x, index, other, accumulate=True: torch.index_put(x, (index,), other, accumulate=accumulate),
        _put_rows,
        kinds=(FLOATS, INDEX, FLOATS),
    ),
    chooses("__getitem__", lambda x, index: x[index], picked_rows, kinds=(FLOATS, INDEX)),
    chooses("sort", torch.sort, either(along(), along(descending=True)), domain=DISTINCT),
    chooses(
        "sort stable",
        lambda x, dim, descending=False: torch.sort(x, stable=True, dim=dim, descending=descending),
        either(along(), along(descending=True)),
        domain=DISTINCT,
    ),
    chooses("argsort", torch.argsort, either(along(), along(descending=True), along(stable=True)), domain=DISTINCT),
    chooses("topk", torch.topk, _one_k_per_dim, domain=DISTINCT),
    chooses("kthvalue", torch.kthvalue, moved(per_dim("k", 1, 2)), domain=DISTINCT),
)
