"""Defines `LinearCase`: one linear layer under tensor parallelism.

Letters: T tokens (product of the leading dims), K in_features, N out_features.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from equivtest.base import limits
from equivtest.cases.activation import ActivationCase
from equivtest.cases.axes import SIZES, Fields, dtensor_or_plain, gradients, shapes, shards, table, table_of
from equivtest.cases.case import Refused, Shape, replicated, require
from equivtest.cases.case_tensor import CaseTensor
from equivtest.cases.rules import Dims, OneOf, SomeOf, Within
from equivtest.layout import Layout, Replicate, Shard, parse_placement

STYLES = ("colwise", "rowwise")
LINEAR_MODES = ("dense", "wide-x", "wide-w", "wide-g")
"""Modes of exact values, which are judged by equality."""

REAL_MODES = ("real", "real-cancelling")
"""Modes of real values, which are judged by a derived bound."""


def _by_features(fields: Fields) -> tuple[str, ...]:
    """Returns placements to draw from, most of them of the feature dim: for x if rowwise, for the output if colwise."""
    by_dim = shards(len(fields["leading"]) + 1)
    return ("replicate", *by_dim, by_dim[-1], by_dim[-1])


def _whole(fields: Fields) -> tuple[str, ...]:
    by_dim = shards(len(fields["leading"]) + 1)
    return ("replicate", "replicate", *by_dim, by_dim[-1])


def _input_layouts(fields: Fields) -> tuple[str, ...]:
    return _whole(fields) if fields["style"] == "colwise" else _by_features(fields)


def _output_layouts(fields: Fields) -> tuple[str, ...]:
    return _by_features(fields) if fields["style"] == "colwise" else _whole(fields)


def _trainable(fields: Fields) -> tuple[str, ...]:
    return ("x", "weight", "bias") if fields["bias"] else ("x", "weight")


def _x_is_dtensor(fields: Fields) -> tuple[bool, ...]:
    return dtensor_or_plain((*fields["leading"], fields["in_features"]), fields["input_layout"], fields["world_size"])


@dataclass(frozen=True, kw_only=True, repr=False)
class LinearCase(ActivationCase):
    """Describes a linear layer y = x W^T + b, forward and backward, with the weight sharded on one of its dims.

    W is the weight (N, K) and b is the bias (N,), for K in_features and N out_features.

    Attributes:
        style: If 'colwise', weight and bias are sharded on N. If 'rowwise', the weight is sharded on K and the bias is
            replicated.
        leading: Leading dims of the activation, none to three. x has the shape (*leading, K).
        bias: Whether the layer has a bias, whose values are never zero.
        input_layout, output_layout: Placement of x and of the output, 'replicate' or 'shard(DIM)' with DIM in
            0..len(leading).
        x_is_dtensor: Whether x is passed as a DTensor. Uneven shards require this, because torch computes the global
            shape of a plain tensor as local size times ranks.
        use_local_output: Option of torch's styles. If True, the output is a plain tensor instead of a DTensor.
        requires_grad: Which of 'x', 'weight', 'bias' need a gradient, in this order.
        x_contiguous, cotangent_contiguous: Whether the harness passes x, or the cotangent, contiguous in memory.
    """

    VALUE_MODES: ClassVar[tuple[str, ...]] = LINEAR_MODES + REAL_MODES
    MODES_DRAWN: ClassVar[tuple[tuple[str, ...], ...]] = (
        *((mode,) for mode in LINEAR_MODES + REAL_MODES),
        *[(*LINEAR_MODES, *REAL_MODES * 2)] * 40,
    )
    """Modes of the draws of one case; half of the draws of a full case are real."""

    style: Annotated[str, OneOf(STYLES)]
    leading: Annotated[Shape, Dims(0, limits.MAX_DIMS - 1), shapes((1, 0, 1, 1, 1, 2, 2, 3))] = (1,)
    in_features: Annotated[int, Within(1, limits.MAX_FEATURES), SIZES] = 1
    out_features: Annotated[int, Within(1, limits.MAX_FEATURES), SIZES] = 1
    bias: Annotated[bool, table(*[False], *[True] * 3)] = False
    input_layout: Annotated[str, table_of(_input_layouts)] = "replicate"
    output_layout: Annotated[str, table_of(_output_layouts)] = "replicate"
    x_is_dtensor: Annotated[bool, table_of(_x_is_dtensor)] = False
    use_local_output: bool = True
    requires_grad: Annotated[tuple[str, ...], SomeOf(("x", "weight", "bias")), gradients(_trainable)] = ("x", "weight")
    x_contiguous: bool = True
    cotangent_contiguous: bool = True

    def check_fields(self) -> None:
        require(
            self.bias or "bias" not in self.requires_grad,
            "requires_grad names the bias, but the layer has none: set bias=True, got requires_grad "
            f"{self.requires_grad}",
        )
        for name in ("input_layout", "output_layout"):
            placement = parse_placement(getattr(self, name))
            require(
                isinstance(placement, Replicate | Shard), f"{name} must be replicate or shard(DIM), got {placement}"
            )

    def check_layouts(self) -> None:
        require(
            self.x_is_dtensor or not self.input_is_uneven,
            f"x of shape {self.tensors['x'].shape} has uneven shards under {self.input_layout} on {self.world_size} "
            "ranks: set x_is_dtensor=True",
        )

    def describe_tensors(self) -> dict[str, CaseTensor]:
        x, output = (Layout((parse_placement(text),)) for text in (self.input_layout, self.output_layout))
        by_rows = self.style == "rowwise"
        layouts = {"x": x, "weight": Layout((Shard(int(by_rows)),)), "cotangent": output}
        layouts["bias"] = replicated() if by_rows else Layout((Shard(0),))
        shapes: dict[str, Shape] = {
            "x": (*self.leading, self.in_features),
            "weight": (self.out_features, self.in_features),
            "bias": (self.out_features,),
            "cotangent": (*self.leading, self.out_features),
        }
        names = self.parameter_names()
        given = ("x", *names, "cotangent")
        tensors = {
            name: self.given(name, shapes[name], replicated() if name in names else layouts[name]) for name in given
        }
        tensors["output"] = CaseTensor(shapes["cotangent"], output, "output")
        tensors |= {f"param.{name}": CaseTensor(shapes[name], layouts[name], "state") for name in names}
        return tensors | {f"grad.{n}": CaseTensor(shapes[n], layouts[n], "gradient") for n in self.requires_grad}

    @property
    def num_dims(self) -> int:
        return len(self.leading) + 1

    @property
    def input_is_uneven(self) -> bool:
        return self.worst_shard_kind(("x",)) != "even"

    def parameter_names(self) -> tuple[str, ...]:
        return ("weight", "bias") if self.bias else ("weight",)


REFUSALS = ("in_features", "dtype")


@dataclass(frozen=True, kw_only=True, repr=False)
class RefusedLinearCase(Refused, LinearCase):
    """Describes a linear layer whose x does not fit its weight. Every rank must refuse the layer with the same error.

    Attributes:
        misfit: The reason for the refusal. If 'in_features', x has one feature more than the weight. If 'dtype', x is
            float64 and the weight has another dtype, or x is float32 and the weight is float64.
    """

    misfit: Annotated[str, OneOf(REFUSALS)] = "in_features"

    @property
    def refusal(self) -> str:
        return f"x does not fit the weight: {self.misfit}"
