"""Defines cases that ask FSDP2 for a sharding of a parameter. The documentation of FSDP2 excludes this sharding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from equivtest.cases.case import Refused, require
from equivtest.cases.rules import OneOf
from equivtest.families.training.data_parallel.case import DataParallelCase

MISFITS = ("dim", "placement", "uneven", "not_contiguous")


@dataclass(frozen=True, kw_only=True, repr=False)
class RefusedShardingCase(Refused, DataParallelCase):
    """Describes a request to shard in_proj.weight that every rank must refuse with the same error.

    Attributes:
        misfit: The requested sharding. If 'dim', the weight is sharded on a dim that it does not have. If 'placement',
            the weight is whole on every rank. If 'uneven', the weight is sharded on dim 1, with unequal numbers of
            columns per rank. If 'not_contiguous', the weight is sharded on dim 0, but its columns lie one after the
            other in memory.

    Source: torch/distributed/fsdp/_fully_shard/_fully_shard.py, shard_placement_fn of fully_shard;
    FSDPParam._init_sharded_param in _fsdp_param.py (2.13.0).
    """

    style: str = "fsdp2"
    misfit: Annotated[str, OneOf(MISFITS)] = "dim"

    def check_fields(self) -> None:
        require(self.style == "fsdp2", f"a case with a misfit must have style='fsdp2', got {self.style!r}")
        require(not self.by_columns, f"misfit determines the sharded dim: leave by_columns out, got {self.by_columns}")
        require(
            self.misfit != "uneven" or self.in_features % self.world_size != 0,
            f"{self.in_features} columns on {self.world_size} ranks are even, which FSDP2 does not refuse",
        )
        require(
            self.misfit != "not_contiguous" or min(self.in_features, self.hidden_features) > 1,
            "a weight of one row or column is always contiguous: use two rows and columns at least",
        )
        super().check_fields()

    @property
    def refusal(self) -> str:
        return f"a weight cannot be sharded as requested: {self.misfit}"
