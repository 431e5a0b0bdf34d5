"""Cases of one embedding, within the contract and outside of it."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

from equivtest.cases.picks import (
    NUM_LEADING_DIMS,
    REFUSED_MODES,
    edge_sizes,
    pick,
    pick_gradients,
    pick_run,
    pick_shape,
    pick_values,
    pick_x_is_dtensor,
)
from equivtest.families.embedding.case import MISFITS, NO_PADDING, EmbeddingCase, RefusedEmbeddingCase
from equivtest.property import Space

EMBEDDING_MODES = (("dense",), ("index",), ("special",), ("real",), *[("dense", "index", "special", "real")] * 16)
PADDED = (False, False, True)


@st.composite
def embedding_cases(draw: DrawFn, space: Space, *, style: str) -> EmbeddingCase:
    """Cases of one embedding; `style` is 'colwise' or 'rowwise'.

    Shrinks to one draw of dense values, one token, one id, one feature, everything replicated.
    """
    return EmbeddingCase(style=style, **_pick_all(draw, space))


def _pick_all(draw: DrawFn, space: Space) -> dict[str, Any]:
    """Every field but the style."""
    fields = _pick_embedding(draw, space)
    world_size, leading = fields["world_size"], fields["leading"]
    shards = tuple(f"shard({dim})" for dim in range(len(leading) + 1))
    input_layout = pick(draw, "input_layout", ("replicate", "replicate", *shards[:-1]))
    padded = pick(draw, "padded", PADDED)
    padding_idx = pick(draw, "padding_idx", edge_sizes(world_size)) % fields["num_embeddings"]
    return dict(
        **fields,
        input_layout=input_layout,
        output_layout=pick(draw, "output_layout", ("replicate", "replicate", *shards)),
        ids_dtype=pick(draw, "ids_dtype", ("int64", "int64", "int64", "int32")),
        ids_is_dtensor=pick_x_is_dtensor(draw, leading, input_layout, world_size),
        use_local_output=pick(draw, "use_local_output", (True, False)),
        padding_idx=padding_idx if padded else NO_PADDING,
        scale_grad_by_freq=pick(draw, "scale_grad_by_freq", (False, False, False, True)),
        **pick_gradients(draw, ("weight",), x="ids"),
        **pick_run(draw, world_size, EMBEDDING_MODES),
    )


@st.composite
def refused_embedding_cases(draw: DrawFn, space: Space, *, style: str) -> RefusedEmbeddingCase:
    """Cases of an id outside the vocabulary, ids that are no integers, or an option that no style has.

    Of any layout, but of ids that no rank must be told the global shape of.
    """
    fields = _pick_embedding(draw, space)
    return RefusedEmbeddingCase(
        misfit=pick(draw, "misfit", MISFITS),
        style=style,
        **fields,
        output_layout=pick(draw, "output_layout", ("replicate", f"shard({len(fields['leading'])})")),
        values=pick_values(draw, REFUSED_MODES),
    )


def _pick_embedding(draw: DrawFn, space: Space) -> dict[str, Any]:
    world_size = pick(draw, "world_size", space.world_sizes)
    return {
        "world_size": world_size,
        "dtype": pick(draw, "dtype", space.dtypes),
        "leading": pick_shape(draw, "leading", world_size, NUM_LEADING_DIMS),
        "num_embeddings": pick(draw, "num_embeddings", edge_sizes(world_size)),
        "embedding_dim": pick(draw, "embedding_dim", edge_sizes(world_size)),
    }
