"""Defines `EmbeddingCase`: one embedding under tensor parallelism.

Letters: T tokens (product of the dims of the ids), V num_embeddings, D embedding_dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from equivtest.base import limits
from equivtest.cases.axes import SIZES, Fields, dtensor_or_plain, shapes, shards, table_of
from equivtest.cases.case import Case, Refused, Shape, replicated, require
from equivtest.cases.case_tensor import CaseTensor
from equivtest.cases.rules import Dims, OneOf, Within
from equivtest.layout import Layout, Replicate, Shard, parse_placement, shard_bounds

STYLES = ("colwise", "rowwise")
EXACT_MODES = ("dense", "index", "special")
"""Modes in which the sums of the gradient are exact."""

REAL_MODE = "real"
IDS_DTYPES = ("int64", "int32")
NO_PADDING = -1


def _input_layouts(fields: Fields) -> tuple[str, ...]:
    return ("replicate", "replicate", *shards(len(fields["leading"])))


def _output_layouts(fields: Fields) -> tuple[str, ...]:
    return ("replicate", "replicate", *shards(len(fields["leading"]) + 1))


def _ids_are_dtensors(fields: Fields) -> tuple[bool, ...]:
    return dtensor_or_plain(fields["leading"], fields["input_layout"], fields["world_size"])


def _padding_ids(fields: Fields) -> tuple[int, ...]:
    return (*[NO_PADDING] * fields["num_embeddings"], *range(fields["num_embeddings"]))


@dataclass(frozen=True, kw_only=True, repr=False)
class EmbeddingCase(Case):
    """Describes one embedding, forward and backward. One dim of its weight is sharded.

    The output has one row per token t: output[t] = weight[ids[t]].

    Attributes:
        style: The dim on which the weight (num_embeddings, embedding_dim) is sharded. 'colwise' shards embedding_dim,
            and 'rowwise' shards num_embeddings.
        leading: Dims of the ids, none to three. The output has the shape (*leading, embedding_dim).
        input_layout: Placement of the ids, 'replicate' or 'shard(DIM)'.
        output_layout: Placement of the output, 'replicate' or 'shard(DIM)'. DIM may be len(leading), which is the
            embedding dim.
        ids_dtype: 'int64' or 'int32'.
        ids_is_dtensor: Whether the ids are passed as a DTensor. Uneven shards require this, because torch computes the
            global shape of a plain tensor as local size times ranks.
        use_local_output: Option of torch's styles. If True, the output is a plain tensor instead of a DTensor.
        padding_idx: The id whose row gets no gradient. If -1, there is no such id.
        scale_grad_by_freq: Whether each row's gradient is divided by the number of times that the row's id occurs.
        requires_grad: ('weight',) if the weight needs a gradient, () if it does not.
        ids_contiguous, cotangent_contiguous: Whether the harness passes the ids, or the cotangent, contiguous.
    """

    VALUE_MODES: ClassVar[tuple[str, ...]] = (*EXACT_MODES, REAL_MODE)

    style: Annotated[str, OneOf(STYLES)]
    leading: Annotated[Shape, Dims(0, limits.MAX_DIMS - 1), shapes((1, 0, 1, 1, 1, 2, 2, 3))] = (1,)
    num_embeddings: Annotated[int, Within(1, limits.MAX_FEATURES), SIZES] = 1
    embedding_dim: Annotated[int, Within(1, limits.MAX_FEATURES), SIZES] = 1
    input_layout: Annotated[str, table_of(_input_layouts)] = "replicate"
    output_layout: Annotated[str, table_of(_output_layouts)] = "replicate"
    ids_dtype: Annotated[str, OneOf(IDS_DTYPES)] = "int64"
    ids_is_dtensor: Annotated[bool, table_of(_ids_are_dtensors)] = False
    use_local_output: bool = True
    padding_idx: Annotated[int, table_of(_padding_ids, label=lambda idx: idx != NO_PADDING)] = NO_PADDING
    scale_grad_by_freq: bool = False
    requires_grad: Annotated[tuple[str, ...], OneOf(((), ("weight",)))] = ("weight",)
    ids_contiguous: bool = True
    cotangent_contiguous: bool = True

    def check_fields(self) -> None:
        require(
            NO_PADDING <= self.padding_idx < self.num_embeddings,
            f"padding_idx must be in -1..{self.num_embeddings - 1}, got {self.padding_idx}",
        )
        for name in ("input_layout", "output_layout"):
            placement = parse_placement(getattr(self, name))
            require(
                isinstance(placement, Replicate | Shard), f"{name} must be replicate or shard(DIM), got {placement}"
            )

    def check_layouts(self) -> None:
        require(
            self.ids_is_dtensor or not self.input_is_uneven,
            f"ids of shape {self.leading} have uneven shards under {self.input_layout} on {self.world_size} "
            "ranks: set ids_is_dtensor=True",
        )

    def describe_tensors(self) -> dict[str, CaseTensor]:
        weight, sharded = (self.num_embeddings, self.embedding_dim), Layout((Shard(int(self.style == "colwise")),))
        ids, output = (Layout((parse_placement(text),)) for text in (self.input_layout, self.output_layout))
        shape = (*self.leading, self.embedding_dim)
        return {
            "ids": CaseTensor(self.leading, ids, is_contiguous=self.ids_contiguous),
            "weight": CaseTensor(weight, replicated(), needs_grad="weight" in self.requires_grad),
            "cotangent": CaseTensor(shape, output, is_contiguous=self.cotangent_contiguous),
            "output": CaseTensor(shape, output, "output"),
            "param.weight": CaseTensor(weight, sharded, "state"),
            **{f"grad.{name}": CaseTensor(weight, sharded, "gradient") for name in self.requires_grad},
        }

    @property
    def num_dims(self) -> int:
        return len(self.leading) + 1

    @property
    def sharded_size(self) -> int:
        return self.embedding_dim if self.style == "colwise" else self.num_embeddings

    @property
    def input_is_uneven(self) -> bool:
        return self.worst_shard_kind(("ids",)) != "even"

    def edge_ids(self) -> tuple[int, ...]:
        """Returns `padding_idx`, and the first and last id of each rank's shard of the vocabulary, ascending.

        A colwise embedding does not shard the vocabulary, but gets the same ids as a rowwise embedding.
        """
        parts = [shard_bounds(self.num_embeddings, self.world_size, rank) for rank in range(self.world_size)]
        ids = {edge for start, stop in parts if start < stop for edge in (start, stop - 1)}
        return tuple(sorted(ids | ({self.padding_idx} - {NO_PADDING})))


MISFITS = ("above", "below", "dtype", "max_norm")


@dataclass(frozen=True, kw_only=True, repr=False)
class RefusedEmbeddingCase(Refused, EmbeddingCase):
    """Describes an embedding that every rank must refuse with the same error.

    Attributes:
        misfit: The reason for the refusal. If 'above', one id is num_embeddings. If 'below', one id is -1. If 'dtype',
            the ids are float32. If 'max_norm', the embedding renormalizes rows in place, which torch's styles do not
            support.
    """

    MODES_DRAWN: ClassVar[tuple[tuple[str, ...], ...]] = (("dense",),)

    misfit: Annotated[str, OneOf(MISFITS)] = "above"

    @property
    def refusal(self) -> str:
        return f"the ids or options do not fit the embedding: {self.misfit}"
