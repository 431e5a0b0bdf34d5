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
from equivtest.cases.rules import Dims, OneOf, Within
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
        source_rank: Argument `src_data_rank` of distribute_tensor. All other ranks have a wrong x.
        grad_source: Argument `grad_placements` of from_local. If empty, from_local does not get it.
        states_shape: Whether from_local gets the global shape, as uneven shards need.
        checks: Argument `run_check` of from_local. Along each axis on which x is replicated, only the first rank has
            the right x then, and from_local broadcasts it.
        from_end: Whether redistribute, distribute_tensor and from_local get the dims of shards counted from the end. On
            the road 'dtensor', the call that makes the leaf gets them counted from the front.
        async_op: Argument of redistribute.
        forward_dtype, backward_dtype: Arguments of redistribute. If '', redistribute does not get them.
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
    source_rank: Annotated[int, Within(0)] = 0
    grad_source: tuple[str, ...] = ()
    states_shape: bool = True
    checks: bool = False
    from_end: bool = False
    async_op: bool = False
    forward_dtype: Annotated[str, OneOf(("", *limits.DTYPES))] = ""
    backward_dtype: Annotated[str, OneOf(("", *limits.DTYPES))] = ""
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
        self._check_grad_source()
        self._check_dtypes()

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
        require(
            self.source_rank < (min(self.mesh_shape) if self.road == "distribute" else 1),
            f"source_rank must be a rank of each axis, and 0 unless road='distribute', got {self.source_rank}",
        )
        require(not self.source_rank or not self.records, "the documented source is rank 0: set records=False")
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
        require(not self.checks or self.road != "distribute", "run_check is for from_local: set checks=False")
        require(not self.checks or not self.records, "collectives of run_check are not documented: set records=False")
        require(not self.checks or not self.members, "run_check waits for all ranks of the world: omit members")

    def _check_grad_source(self) -> None:
        if not self.grad_source:
            return
        require(self.leaves_as_plain_tensor, f"grad_source is for road 'local' or 'full_tensor', got {self.road!r}")
        require(not self.records, "collectives of grad_source are not documented: set records=False")
        require(
            len(self.grad_source) == self.num_axes
            and all(_has_local_shape(*pair) for pair in zip(self.source, self.grad_source, strict=True)),
            f"grad_source must have the source's shards, and 'replicate' or 'partial(sum)' elsewhere, got "
            f"{self.grad_source} for {self.source}",
        )
        require(
            not self.divides_gradient or all(mode != "special" for mode, _ in self.values),
            "no bound is known for special values that are divided by the number of ranks: choose other values",
        )
        require(
            not self.divides_gradient or not self.reduction("cotangent")[0],
            f"no bound is known for sums that are divided by the number of ranks: got the cotangent {self.cotangent}",
        )

    def _check_dtypes(self) -> None:
        dtypes = (self.forward_dtype, self.backward_dtype)
        require(dtypes == ("", "") or self.road != "full_tensor", "full_tensor converts no dtype: omit the two dtypes")
        require(dtypes == ("", "") or not self.records, "bytes are documented for one dtype: set records=False")
        ops = (self.reduction("x")[0], self.reduction("cotangent")[0])
        require(
            fits_sums(self.dtype, dtypes, ops),
            f"sums in {dtypes} would round {self.dtype}: choose dtypes with more bits and a wider range",
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
        if self.grad_source:
            return _layout(self.grad_source)
        if self.leaves_as_plain_tensor:
            return without_partial(source)
        pairs = zip(source.placements, cotangent.placements, strict=True)
        reduced = (isinstance(old, Partial) and not isinstance(new, Partial) for old, new in pairs)
        kept = zip(source.placements, reduced, strict=True)
        return Layout(tuple(Replicate() if is_reduced else old for old, is_reduced in kept))

    @property
    def divides_gradient(self) -> bool:
        """True if the gradient is partial. Torch divides it among the ranks, because it is whole before."""
        return "partial(sum)" in self.grad_source

    @property
    def dtypes(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(filter(None, (self.dtype, self.forward_dtype, self.backward_dtype))))

    @property
    def dtypes_sent(self) -> tuple[str, ...]:
        return self.dtypes

    @property
    def output_dtype(self) -> str:
        return self.forward_dtype or self.dtype

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
        """True if the bits of some answer are known."""
        return any(self.fixes_bits_of(name, draw) for name in self.answer_names())

    def fixes_bits_of(self, name: str, draw: int) -> bool:
        """True if the bits of the answer 'output' or 'grad.x' are known.

        The order of additions changes the bits of a sum or an average of real numbers. The kernel that converts special
        values changes the bits of NaN.
        """
        mode, _ = self.values[draw]
        if name == "grad.x" and self.divides_gradient:
            return False
        op = self.reduction("x" if name == "output" else "cotangent")[0]
        return op not in ("sum", "avg") if mode == REAL_MODE else mode != "special" or bool(op) or len(self.dtypes) == 1

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


def fits_sums(dtype: str, converted: tuple[str, str], ops: tuple[str, str]) -> bool:
    """True if no sum or average of x or of the cotangent is in a dtype that would round its terms.

    Args:
        dtype: The dtype of x.
        converted: `forward_dtype` and `backward_dtype`. The cotangent has the forward dtype before it is converted.
        ops: Reductions of x and of the cotangent, '' without one.
    """
    forward, backward = converted
    adds = [op in ("sum", "avg") for op in ops]
    return (
        (not adds[0] or widens(dtype, forward))
        and (not adds[1] or widens(dtype, backward))
        and (not adds[1] or widens(dtype, forward) or (forward == "bfloat16" and ops[1] == "sum"))
    )


def widens(dtype: str, other: str) -> bool:
    """True if `other` has each number of `dtype`. '' is `dtype` itself."""
    return other in ("", dtype, "float64") or (other == "float32" and dtype != "float64")


def _has_local_shape(source: str, gradient: str) -> bool:
    """True if a gradient with one of the placements has the local shape of a tensor with the other."""
    return source == gradient if source.startswith("shard") else gradient in ("replicate", "partial(sum)")


def _layout(texts: tuple[str, ...]) -> Layout:
    return Layout(tuple(map(parse_placement, texts)))
