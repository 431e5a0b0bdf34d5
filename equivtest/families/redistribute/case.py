"""Defines `RedistributeCase`: one DTensor that is redistributed, forward and backward, on a mesh of one or two axes.

A tensor that is partial on some axes is passed as the stack of its terms, one term for each rank along these axes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar

from equivtest.base import limits
from equivtest.cases.activation import X_ALONE, ActivationCase
from equivtest.cases.case import Shape, replicated, require
from equivtest.cases.case_tensor import CaseTensor
from equivtest.cases.operands import partial_axes, stacked, without_partial
from equivtest.cases.rules import Dims, OneOf
from equivtest.layout import (
    Layout,
    Partial,
    Replicate,
    Shard,
    parse_placement,
    shard_kind,
)

ROADS = ("dtensor", "local", "full_tensor", "distribute")
"""Ways to make the DTensor and to return its result; see `RedistributeCase.road`."""

REAL_MODE = "real"
MAX_AXES = 2


@dataclass(frozen=True, kw_only=True, repr=False)
class RedistributeCase(ActivationCase):
    """Describes one redistribution of a tensor x. The output is x under other placements.

    The gradient of x is the cotangent under x's placements.

    Attributes:
        mesh: Number of ranks along each of at most two mesh axes. If empty, the mesh has one axis of all ranks.
        flattened: Whether DeviceMesh._flatten has also made one mesh of the two axes. If so, torch takes steps over
            both axes in one collective.
        shape: Global shape of the tensor, up to four dims; sizes may be 0.
        source, target: One placement per axis, 'replicate', 'shard(DIM)' or 'partial(OP)'. The target is partial only
            on axes on which the source has the same partial placement.
        cotangent: Placements of the cotangent. If empty, the cotangent has the output's placements; if the output is a
            plain tensor, partial placements become replicated.
        road: The calls of torch that make and return the DTensor. If 'dtensor', the leaf of autograd and the output are
            DTensors. If 'local', the calls are from_local, redistribute and to_local, and the leaf is the local tensor.
            If 'full_tensor', the calls are from_local and full_tensor, and the target is replicated. If 'distribute',
            distribute_tensor distributes the source rank's whole tensor, and the leaf and the output are DTensors.
        states_shape: Whether from_local gets the global shape, as uneven shards need.
        async_op: Argument of redistribute.
        requires_grad: ('x',) if x needs a gradient, () if it does not.
        x_contiguous, cotangent_contiguous: Whether the harness passes x, or the cotangent, contiguous in memory.
    """

    VALUE_MODES: ClassVar[tuple[str, ...]] = ("dense", "index", "special", REAL_MODE)

    mesh: Annotated[Shape, Dims(0, MAX_AXES)] = ()
    flattened: bool = False
    shape: Annotated[Shape, Dims(0, limits.MAX_DIMS, smallest=0)] = (1,)
    source: tuple[str, ...] = ("replicate",)
    target: tuple[str, ...] = ("replicate",)
    cotangent: tuple[str, ...] = ()
    road: Annotated[str, OneOf(ROADS)] = "dtensor"
    states_shape: bool = True
    async_op: bool = False
    requires_grad: Annotated[tuple[str, ...], OneOf(X_ALONE)] = ("x",)
    x_contiguous: bool = True
    cotangent_contiguous: bool = True

    def check_fields(self) -> None:
        require(
            math.prod(self.mesh_shape) == self.world_size,
            f"mesh must have {self.world_size} ranks, got {self.mesh}",
        )
        require(not self.flattened or len(self.mesh) == MAX_AXES, f"flattened is for two axes, got mesh {self.mesh}")
        require(
            len(self.mesh_shape) == 1 or not self.records,
            f"collectives are documented for a mesh of one axis, got {self.mesh}: set records=False",
        )
        for name in ("source", "target", "cotangent"):
            self._check_placements(name)
        self._check_road()

    def _check_placements(self, name: str) -> None:
        texts, num_axes = getattr(self, name), len(self.mesh_shape)
        if name == "cotangent" and not texts:
            return
        require(len(texts) == num_axes, f"{name} must have one placement per mesh axis: {num_axes}, got {texts}")
        ops = {placement.op for placement in map(parse_placement, texts) if isinstance(placement, Partial)}
        require(len(ops) <= 1, f"{name} must have at most one kind of partial placement, got {texts}")
        require(
            not any(text.startswith("flat") for text in texts),
            f"{name}: the placement flat is not for DTensors, got {texts}",
        )
        if name == "target":
            changed = [a for a, text in enumerate(texts) if text.startswith("partial") and text != self.source[a]]
            require(not changed, f"target may be partial only on axes with the same partial source, got {texts}")

    def _check_road(self) -> None:
        require(
            self.road != "full_tensor" or set(self.target) == {"replicate"},
            f"with road='full_tensor' the target must be replicate, got {self.target}",
        )
        require(self.road != "full_tensor" or not self.async_op, "full_tensor always waits: set async_op=False")
        require(
            self.road != "distribute" or not any(text.startswith("partial") for text in self.source),
            f"with road='distribute' the source must not be partial, got {self.source}",
        )
        if self.cotangent and self.leaves_as_plain_tensor:
            pairs = zip(self.target, self.cotangent, strict=True)
            require(
                all(left == right for left, right in pairs if "shard" in left + right),
                f"the cotangent of a plain tensor must have its local shape, got {self.cotangent} for {self.target}",
            )
        require(
            self.states_shape or (self.road != "distribute" and self._source_is_even()),
            f"from_local derives the global shape from equal local shapes: set states_shape=True for {self.shape} "
            f"under {self.source}",
        )

    def _source_is_even(self) -> bool:
        divisors = dict.fromkeys(range(len(self.shape)), 1)
        for axis, placement in enumerate(_layout(self.source).placements):
            if isinstance(placement, Shard):
                divisors[placement.dim] = divisors.get(placement.dim, 1) * self.mesh_shape[axis]
        return all(size % divisors[dim] == 0 for dim, size in enumerate(self.shape))

    @property
    def mesh_shape(self) -> Shape:
        return self.mesh or (self.world_size,)

    @property
    def num_axes(self) -> int:
        return len(self.mesh_shape)

    @property
    def leaves_as_plain_tensor(self) -> bool:
        return self.road in ("local", "full_tensor")

    @property
    def cotangent_layout(self) -> Layout:
        if self.cotangent or not self.leaves_as_plain_tensor:
            return _layout(self.cotangent or self.target)
        return without_partial(_layout(self.target))

    @property
    def gradient_layout(self) -> Layout:
        """Returns the layout that the gradient of x must have.

        The gradient has the source's layout, except on an axis on which the source is partial. On such an axis the
        gradient is partial if the output is a DTensor and its cotangent is partial on that axis too. Otherwise it is
        replicated.

        Source: DTensor.from_local, its table of gradient placements, in torch/distributed/tensor/_api.py for local
        leaves; _redistribute_backward in torch/distributed/tensor/_redistribute.py (2.13.0), which keeps axes partial
        if both tensors are partial on them.
        """
        source, cotangent = _layout(self.source), self.cotangent_layout
        if self.leaves_as_plain_tensor:
            return without_partial(source)
        pairs = zip(source.placements, cotangent.placements, strict=True)
        reduced = (isinstance(old, Partial) and not isinstance(new, Partial) for old, new in pairs)
        kept = zip(source.placements, reduced, strict=True)
        return Layout(tuple(Replicate() if is_reduced else old for old, is_reduced in kept))

    def operand_layout(self, name: str) -> Layout:
        """Layout of 'x' or 'cotangent' as a DTensor, partial placements included."""
        return _layout(self.source) if name == "x" else self.cotangent_layout

    def reduction(self, name: str) -> tuple[str, int]:
        """Returns (op, number of terms) of a partial 'x' or 'cotangent', and ('', 1) if the tensor is not partial."""
        axes = partial_axes(self.operand_layout(name))
        if not axes:
            return "", 1
        placement = self.operand_layout(name).placements[axes[0]]
        assert isinstance(placement, Partial)
        return placement.op, math.prod(self.mesh_shape[axis] for axis in axes)

    def fixes_bits(self, draw: int) -> bool:
        """False if an answer is a sum or an average of real numbers: the order of the additions changes its bits."""
        mode, _ = self.values[draw]
        given = {"output": "x", "grad.x": "cotangent"}
        ops = {self.reduction(given[name])[0] for name in self.answer_names()}
        return mode != REAL_MODE or not ops <= {"sum", "avg"}

    def describe_tensors(self) -> dict[str, CaseTensor]:
        x = replicated(self.num_axes) if self.road == "distribute" else stacked(_layout(self.source))
        tensors = {
            name: self.given(name, (*self._stack(name), *self.shape), layout)
            for name, layout in (("x", x), ("cotangent", stacked(self.cotangent_layout)))
        }
        tensors["output"] = CaseTensor(self.shape, _layout(self.target), "output")
        gradient = CaseTensor(self.shape, self.gradient_layout, "gradient")
        return tensors | {f"grad.{name}": gradient for name in self.requires_grad}

    def _stack(self, name: str) -> Shape:
        """Number of ranks along each axis on which the tensor `name` is partial."""
        return tuple(self.mesh_shape[axis] for axis in partial_axes(self.operand_layout(name)))

    @property
    def shard_kind(self) -> str:
        """Most uneven kind of shards of source, target and cotangent: 'even', 'uneven' or 'empty'."""
        placed = (_layout(self.source), _layout(self.target), self.cotangent_layout)
        kinds = {shard_kind(self.shape, layout, self.mesh_shape) for layout in placed}
        return next(kind for kind in ("empty", "uneven", "even") if kind in kinds)


def _layout(texts: tuple[str, ...]) -> Layout:
    return Layout(tuple(map(parse_placement, texts)))
