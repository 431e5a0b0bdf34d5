"""Defines `MlpCase`: a perceptron of two linear layers under sequence parallelism, and its training.

Letters: T tokens (product of the leading dims), K in_features, H hidden_features, N out_features.
"""

from __future__ import annotations

from dataclasses import dataclass

from equivtest.cases.case import Shape, replicated, require
from equivtest.families.training.case import PerceptronCase, base_of
from equivtest.layout import Layout, Shard


@dataclass(frozen=True, kw_only=True, repr=False)
class MlpCase(PerceptronCase):
    """Describes a perceptron with x and output sharded along the sequence, and weights along the hidden features.

    Attributes:
        sequence_dim: The leading dim that is divided among the ranks.
        x_is_dtensor: Whether x is passed as a DTensor. Uneven shards require this, because torch computes the global
            shape of a plain tensor as local size times ranks.
        use_local_output: Option of in_proj's style. If True, the hidden activation is a plain tensor.
    """

    sequence_dim: int = 0
    x_is_dtensor: bool = False
    use_local_output: bool = True

    def check_fields(self) -> None:
        super().check_fields()
        require(
            0 <= self.sequence_dim < len(self.leading),
            f"sequence_dim must be one of the {len(self.leading)} leading dims, got {self.sequence_dim}",
        )
        require(not self.tied, f"W1 and W2 are sharded on different dims: omit tied, got {self.tied!r}")
        require(
            not self.checkpointed,
            f"only data parallelism supports checkpointed: leave it out, got {self.checkpointed!r}",
        )
        require(
            self.x_is_dtensor or not self.sequence_is_uneven,
            f"x of shape {(*self.leading, self.in_features)} has uneven shards of dim {self.sequence_dim} on "
            f"{self.world_size} ranks: set x_is_dtensor=True",
        )

    @property
    def sequence_is_uneven(self) -> bool:
        return self.leading[self.sequence_dim] % self.world_size != 0

    def layout_of(self, name: str, shape: Shape) -> Layout:
        base = base_of(name)
        if base in ("x", "cotangent", "output", "grad.x"):
            return Layout((Shard(self.sequence_dim),))
        if base in ("in_proj.weight", "in_proj.bias"):
            return Layout((Shard(0),))
        if base == "out_proj.weight":
            return Layout((Shard(1),))
        if base in ("capture.in_proj.input", "out_proj.bias", "total_norm"):
            return replicated()
        return Layout((Shard(self.num_dims - 1),))

    @property
    def shard_kind(self) -> str:
        return self.worst_shard_kind(("x", "param.in_proj.weight"))
