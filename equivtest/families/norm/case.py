"""Defines `NormCase`: one layer_norm or rms_norm under sequence parallelism.

Letters: T tokens (product of the leading dims), D features.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from equivtest.base import limits
from equivtest.cases.activation import ActivationCase
from equivtest.cases.case import Shape, replicated, require
from equivtest.cases.case_tensor import CaseTensor
from equivtest.cases.rules import Dims, OneOf, Within
from equivtest.layout import Layout, Shard

NORMS = ("layer_norm", "rms_norm")
PARAMETERS = ("weight", "bias")


@dataclass(frozen=True, kw_only=True, repr=False)
class NormCase(ActivationCase):
    """Describes y = norm(x) * weight + bias, with x and y sharded along the sequence. The norm is over the last dim.

    Weight and bias are replicated.

    Attributes:
        norm: 'layer_norm' or 'rms_norm'.
        leading: Leading dims of the activation, one to three. x has the shape (*leading, features).
        sequence_dim: The leading dim that is divided among the ranks.
        features: Size of the last dim. If there are only one or two features, the output is hardly more than signs, and
            its bounds are too wide for a conclusion.
        parameters: Names of the layer's parameters: none, 'weight', or for layer_norm also 'weight' and 'bias'.
        eps: The number that the layer adds to the variance (layer_norm) or to the mean square (rms_norm).
        x_is_dtensor: Whether x is passed as a DTensor. Uneven shards require this, because torch computes the global
            shape of a plain tensor as local size times ranks.
        use_local_output: Option of torch's style. If True, the output is a plain tensor instead of a DTensor.
        requires_grad: Which of 'x', 'weight' and 'bias' need a gradient, in this order.
        x_contiguous, cotangent_contiguous: Whether the harness passes x, or the cotangent, contiguous in memory.
    """

    VALUE_MODES: ClassVar[tuple[str, ...]] = ("real",)

    norm: Annotated[str, OneOf(NORMS)]
    values: tuple[tuple[str, int], ...] = (("real", 0),)
    leading: Annotated[Shape, Dims(1, limits.MAX_DIMS - 1)] = (1,)
    sequence_dim: int = 0
    features: Annotated[int, Within(1, limits.MAX_FEATURES)] = 4
    parameters: tuple[str, ...] = ()
    eps: float = 1e-5
    x_is_dtensor: bool = False
    use_local_output: bool = False
    requires_grad: tuple[str, ...] = ("x",)
    x_contiguous: bool = True
    cotangent_contiguous: bool = True

    def check_fields(self) -> None:
        require(
            0 <= self.sequence_dim < len(self.leading),
            f"sequence_dim must be one of the {len(self.leading)} leading dims, got {self.sequence_dim}",
        )
        most = 2 if self.norm == "layer_norm" else 1
        require(
            self.parameters in [PARAMETERS[:num] for num in range(most + 1)],
            f"parameters of {self.norm} must begin with the first of {', '.join(PARAMETERS[:most])} and skip none, "
            f"got {self.parameters}",
        )
        known = ("x", *self.parameters)
        require(
            self.requires_grad == tuple(name for name in known if name in self.requires_grad),
            f"requires_grad must list some of {', '.join(known)} in this order, got {self.requires_grad}",
        )
        require(0 < self.eps <= 1, f"eps must be above 0 and at most 1, got {self.eps}")
        require(
            self.x_is_dtensor or self.sequence_length % self.world_size == 0,
            f"x of shape {(*self.leading, self.features)} has uneven shards of dim {self.sequence_dim} on "
            f"{self.world_size} ranks: set x_is_dtensor=True",
        )

    @property
    def sequence_length(self) -> int:
        return self.leading[self.sequence_dim]

    def describe_tensors(self) -> dict[str, CaseTensor]:
        x, sequence = (*self.leading, self.features), Layout((Shard(self.sequence_dim),))
        placed = {"x": (x, sequence), "cotangent": (x, sequence)}
        placed |= dict.fromkeys(self.parameters, ((self.features,), replicated()))
        tensors = {name: self.given(name, *placed[name]) for name in ("x", *self.parameters, "cotangent")}
        tensors["output"] = CaseTensor(x, sequence, "output")
        tensors |= {f"param.{name}": CaseTensor(*placed[name], "state") for name in self.parameters}
        return tensors | {f"grad.{name}": CaseTensor(*placed[name], "gradient") for name in self.requires_grad}
