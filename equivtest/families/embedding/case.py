"""One embedding under tensor parallelism.

Letters: T tokens (product of the dims of the ids), V num_embeddings, D embedding_dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from equivtest import limits
from equivtest.kit.case import Case, Refused, Shape, replicated, require
from equivtest.layout import Layout, Replicate, Shard, parse_placement, shard_bounds, shard_kind

STYLES = ("colwise", "rowwise")
EXACT_MODES = ("index", "dense", "special")
"""Modes whose sums are exact."""

REAL_MODE = "real"
IDS_DTYPES = ("int64", "int32")
NO_PADDING = -1


@dataclass(frozen=True, kw_only=True, repr=False)
class EmbeddingCase(Case):
    """output[t] = weight[ids[t]], forward and backward, the weight sharded on one axis.

    Attributes:
        style: 'colwise' shards the weight (V, D) on D; 'rowwise' on V.
        leading: Dims of the ids, none to three of them; the output is (*leading, D).
        input_layout: Placement of the ids, 'replicate' or 'shard(DIM)'.
        output_layout: Placement of the output, the same; DIM may be len(leading), for D.
        ids_dtype: 'int64' or 'int32'.
        ids_is_dtensor: Hand the ids over as a DTensor; needed where their shards are uneven, since
            torch takes the global shape of a plain tensor to be local size times ranks.
        use_local_output: As of torch's styles: answer a plain tensor instead of a DTensor.
        padding_idx: The id whose row gets no gradient; -1: none.
        scale_grad_by_freq: Divide each row's gradient by how often its id occurs.
        requires_grad: ('weight',) or ().
        ids_contiguous, cotangent_contiguous: Memory format of what the harness hands over.
    """

    VALUE_MODES: ClassVar[tuple[str, ...]] = (*EXACT_MODES, REAL_MODE)

    style: str
    leading: Shape = (1,)
    num_embeddings: int = 1
    embedding_dim: int = 1
    input_layout: str = "replicate"
    output_layout: str = "replicate"
    ids_dtype: str = "int64"
    ids_is_dtensor: bool = False
    use_local_output: bool = True
    padding_idx: int = NO_PADDING
    scale_grad_by_freq: bool = False
    requires_grad: tuple[str, ...] = ("weight",)
    ids_contiguous: bool = True
    cotangent_contiguous: bool = True

    def __post_init__(self) -> None:
        require(self.style in STYLES, f"style must be one of {', '.join(STYLES)}, got {self.style!r}")
        require(
            len(self.leading) < limits.MAX_DIMS,
            f"leading must have at most {limits.MAX_DIMS - 1} dims, got {self.leading}",
        )
        require(all(size >= 1 for size in self.leading), f"leading dims must be at least 1, got {self.leading}")
        for name in ("num_embeddings", "embedding_dim"):
            size = getattr(self, name)
            require(1 <= size <= limits.MAX_FEATURES, f"{name} must be in 1..{limits.MAX_FEATURES}, got {size}")
        self._check_options()
        super().__post_init__()
        require(
            self.ids_is_dtensor or not self.input_is_uneven,
            f"ids of shape {self.leading} have uneven shards under {self.input_layout} on {self.world_size} "
            "ranks: set ids_is_dtensor=True",
        )

    def _check_options(self) -> None:
        require(
            self.ids_dtype in IDS_DTYPES, f"ids_dtype must be one of {', '.join(IDS_DTYPES)}, got {self.ids_dtype!r}"
        )
        require(
            NO_PADDING <= self.padding_idx < self.num_embeddings,
            f"padding_idx must be in -1..{self.num_embeddings - 1}, got {self.padding_idx}",
        )
        require(
            self.requires_grad in ((), ("weight",)),
            f"requires_grad must be () or ('weight',), got {self.requires_grad}",
        )
        for name in ("input_layout", "output_layout"):
            placement = parse_placement(getattr(self, name))
            require(
                isinstance(placement, Replicate | Shard), f"{name} must be replicate or shard(DIM), got {placement}"
            )

    def shapes(self) -> dict[str, Shape]:
        weight, output = (self.num_embeddings, self.embedding_dim), (*self.leading, self.embedding_dim)
        shapes = {"ids": self.leading, "weight": weight, "cotangent": output, "output": output, "param.weight": weight}
        return shapes | {f"grad.{name}": weight for name in self.requires_grad}

    def layouts(self) -> dict[str, Layout]:
        weight = Layout((Shard(1 if self.style == "colwise" else 0),))
        ids, output = (Layout((parse_placement(text),)) for text in (self.input_layout, self.output_layout))
        layouts = {"ids": ids, "weight": replicated(), "cotangent": output, "output": output, "param.weight": weight}
        return layouts | {f"grad.{name}": weight for name in self.requires_grad}

    @property
    def num_dims(self) -> int:
        """Dims of the output, the embedding dim included."""
        return len(self.leading) + 1

    @property
    def sharded_size(self) -> int:
        """Size of the dim of the weight that the ranks share."""
        return self.embedding_dim if self.style == "colwise" else self.num_embeddings

    @property
    def has_empty_part(self) -> bool:
        """Whether the last rank has no part of that dim."""
        start, stop = shard_bounds(self.sharded_size, self.world_size, self.world_size - 1)
        return start == stop

    @property
    def input_is_uneven(self) -> bool:
        """Whether ranks hold different numbers of ids."""
        return shard_kind(self.leading, self.layouts()["ids"], self.mesh_shape) != "even"

    @property
    def output_is_uneven(self) -> bool:
        """Whether ranks hold different amounts of the output."""
        return shard_kind(self.shapes()["cotangent"], self.layouts()["cotangent"], self.mesh_shape) != "even"

    def edge_ids(self) -> tuple[int, ...]:
        """The first and last id of each rank's part of the vocabulary, ascending, and `padding_idx`.

        Of the parts of a rowwise embedding; a colwise one, which divides no vocabulary, gets the same.
        """
        parts = [shard_bounds(self.num_embeddings, self.world_size, rank) for rank in range(self.world_size)]
        ids = {edge for start, stop in parts if start < stop for edge in (start, stop - 1)}
        return tuple(sorted(ids | ({self.padding_idx} - {NO_PADDING})))

    def given_names(self) -> tuple[str, ...]:
        return ("ids", "weight", "cotangent")

    def answer_names(self) -> tuple[str, ...]:
        return ("output", "param.weight", *(f"grad.{name}" for name in self.requires_grad))

    def given_flags(self) -> dict[str, bool]:
        return {name: name in self.requires_grad for name in self.given_names()}

    def is_contiguous(self, name: str) -> bool:
        return {"ids": self.ids_contiguous, "cotangent": self.cotangent_contiguous}.get(name, True)


MISFITS = ("above", "below", "dtype", "max_norm")


@dataclass(frozen=True, kw_only=True, repr=False)
class RefusedEmbeddingCase(Refused, EmbeddingCase):
    """An embedding that every rank must refuse alike.

    Attributes:
        misfit: 'above': one id is V; 'below': one id is -1; 'dtype': the ids are float32;
            'max_norm': rows are to be renormalized in place, which no style of torch can.
    """

    misfit: str = "above"

    def __post_init__(self) -> None:
        require(self.misfit in MISFITS, f"misfit must be one of {', '.join(MISFITS)}, got {self.misfit!r}")
        super().__post_init__()

    @property
    def refusal(self) -> str:
        return f"the ids or options do not fit the embedding: {self.misfit}"
