"""Strategies that draw cases.  They build valid cases and filter nothing.

Every draw is `sampled_from` over an explicit table: Hypothesis' integers, floats and strings also
draw constants that it finds in whatever modules are imported, so that the same seed would draw
other cases in another process.  Tables begin with the simplest entry, the one that shrinking ends
at, and repeat an entry to draw it more often.  A case takes the same number of draws whatever they
give, except where fewer is meant to be simpler: Hypothesis counts fewer draws as simpler.

Sizes keep to the edges of a dim's division: around multiples of the world size w, below w, shards
that leave trailing ranks empty, and 31, 32, 33 around a tile of 32.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from itertools import combinations
from typing import Any, TypeVar

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from equivtest.cases.base import Shape
from equivtest.cases.data_parallel import DataParallelCase
from equivtest.cases.embedding import MISFITS, NO_PADDING, EmbeddingCase, RefusedEmbeddingCase
from equivtest.cases.fetch import PADDINGS, FetchCase, RefusedFetchCase
from equivtest.cases.linear import LINEAR_MODES as EXACT_MODES
from equivtest.cases.linear import REAL_MODES, REFUSALS, LinearCase, RefusedLinearCase
from equivtest.cases.mlp import MlpCase
from equivtest.cases.norm import PARAMETERS, NormCase
from equivtest.cases.perceptron import LAYERS
from equivtest.layout import Layout, parse_placement, shard_bounds, shard_kind
from equivtest.property import Space

T = TypeVar("T")

TILE_SIZES = {31, 32, 33}
MAX_EDGE = 33  # elements of a dim: exact values in bfloat16 allow about 250 terms of a sum
MAX_INNER = 16  # elements of the large dim where there are three leading ones, for the same reason
SMALL_SIZES = (1, 2, 3)  # of the dims beside the large one
LARGE_DIMS = tuple(range(12))  # which dim is the large one, modulo their number, 1 to 4
SEEDS = tuple(range(64))

REFUSED_MODES = (("dense",),)
LINEAR_MODES = (
    *((mode,) for mode in EXACT_MODES + REAL_MODES),
    *[(*EXACT_MODES, *REAL_MODES * 2)] * 40,
)
"""Half of a full case's draws are real, so that of a whole run, with its fetches, well over three in ten are."""

FETCH_DRAWS = ("special", "index", "wide", "dense", "special")
FETCH_MODES = (("dense",), ("index",), ("wide",), ("special",), *[FETCH_DRAWS] * 21)
"""An odd number of draws: where draw 0 repeats, what alternates from call to call then shows."""
POISON_TABLE = ("large", "large", "large", "nan", "nan", "none")
REPEATS = (False, False, False, True)
NUM_LEADING_DIMS = (1, 0, 1, 1, 1, 2, 2, 3)
NUM_PARAMETERS = (1, 2, 2, 3, 3, 4, 4, 5, 5)
NUM_PARAMETER_DIMS = (1, 0, 1, 1, 1, 2, 2, 2, 3, 4)
ZERO_NUMEL_SHAPES: tuple[Shape | None, ...] = (None,) * 45 + ((0,), (0, 3), (2, 0))
RECORDS = (False,) * 7 + (True,)
MEMBERS: dict[int, tuple[tuple[int, ...], ...]] = {
    1: ((1,), (2,)),
    2: ((1, 0), (3, 1), (2, 0), (1, 3), (1, 2)),
    3: ((2, 0, 1), (3, 1, 0), (1, 2, 3)),
    4: ((3, 2, 1, 0), (1, 0, 3, 2)),
}
"""Meshes within a world of at most four processes by world size; not all ascend, some leave processes out."""

MEMBERS_DRAWN: tuple[int | None, ...] = (None,) * 25 + (0, 1, 2, 3, 4)
"""Which of them, modulo their number, or the whole world: one table for all world sizes, for shrinking's sake."""

MLP_MODES = (
    ("dense",), ("wide-x",), ("wide-in",), ("wide-out",), ("wide-g",), ("real",),
    *[("dense", "wide-x", "wide-out", "real")] * 8, *[("dense", "wide-in", "wide-g", "real")] * 8,
)  # fmt: skip
CURVED_MODES = (("real",), *[("real", "real")] * 8)
TRAINING_MODES = (("dense",), ("real",), *[("dense", "real")] * 12)
NUM_SEQUENCE_DIMS = (1, 1, 2, 2, 3)
FEATURES = (1, 2, 3, 5, 8, 10)
BIASES = ((), ("in_proj", "out_proj"), ("in_proj", "out_proj"), ("in_proj",), ("out_proj",))
ACTIVATIONS = ("relu",) * 4 + ("gelu", "silu")
LEARNING_RATES = (0.25, 0.5, 0.125, 0.25, 0.1)  # powers of two keep the first updates exact
MOMENTA = (0.0, 0.5, 0.5, 0.9)
WEIGHT_DECAYS = (0.0, 0.25, 0.5, 0.01)
MICRO_BATCHES = (1, 1, 2, 3)
ROWS = (1, 2, 3, 5)  # of one rank in one micro-batch
DATA_PARALLEL_OPTIMIZERS = ("none", "sgd", "sgd", "adamw")
EMBEDDING_MODES = (("dense",), ("index",), ("special",), ("real",), *[("dense", "index", "special", "real")] * 16)
NORM_MODES = (("real",), *[("real", "real", "real")] * 9)
NORM_FEATURES = (*(*range(4, 10), 3, 12, *range(15, 18), *range(31, 34)) * 4, 2, 1)
"""Seldom one or two: a norm then leaves little but signs, and bounds are too wide to conclude anything."""

MAX_TOKENS_IN_16_BITS = 7
"""Gradients of a norm's parameters are sums over tokens kept in 16 bits: of more tokens bounds conclude nothing."""

EPSILONS = (1e-5, 1e-5, 1e-6, 0.01)
PADDED = (False, False, True)
MISFITS_OF_FETCH = ("dtype", "in_flight")


def linear_cases(space: Space, *, style: str) -> SearchStrategy[LinearCase]:
    """Cases of one linear layer; `style` is 'colwise' or 'rowwise'.

    Shrinks to one draw of dense values, one token, one feature, no bias, everything replicated.
    """
    return _linear_cases(space, style)


def fetch_cases(space: Space, *, collective: str = "") -> SearchStrategy[FetchCase]:
    """Cases of one to five parameters, fetched together by `collective`; recorded only where it is named.

    Shrinks to one draw of dense values for one parameter of one element.
    """
    return _fetch_cases(space, collective)


def mlp_cases(space: Space) -> SearchStrategy[MlpCase]:
    """Cases of a perceptron under sequence parallelism: one forward and backward.

    Shrinks to one draw of dense values, one token, one feature everywhere, no bias, relu.
    """
    return _mlp_cases(space)


def training_cases(space: Space) -> SearchStrategy[MlpCase]:
    """Cases of a perceptron trained for two or three steps by SGD or AdamW.

    AdamW is not drawn in float16, where its eps of 1e-8 is zero and a gradient of zero gives 0 / 0.
    Shrinks to two steps of SGD without momentum and weight decay.
    """
    return _training_cases(space)


def data_parallel_cases(space: Space, *, style: str, fetch: str = "") -> SearchStrategy[DataParallelCase]:
    """Cases of a perceptron under data parallelism, three in four of them trained; some parameter needs a gradient.

    Recorded only where `fetch` is named.  Shrinks to one forward and backward of one row.
    """
    return _data_parallel_cases(space, style, fetch)


def embedding_cases(space: Space, *, style: str) -> SearchStrategy[EmbeddingCase]:
    """Cases of one embedding; `style` is 'colwise' or 'rowwise'.

    Shrinks to one draw of dense values, one token, one id, one feature, everything replicated.
    """
    return _embedding_cases(space, style)


def norm_cases(space: Space, *, norm: str) -> SearchStrategy[NormCase]:
    """Cases of one norm under sequence parallelism; `norm` is 'layer_norm' or 'rms_norm'.

    Shrinks to one draw of values, one token, one feature, no parameters.
    """
    return _norm_cases(space, norm)


def refused_embedding_cases(space: Space, *, style: str) -> SearchStrategy[RefusedEmbeddingCase]:
    """Cases of an id outside the vocabulary, ids that are no integers, or an option that no style has."""
    return _refused_embedding_cases(space, style)


def refused_linear_cases(space: Space, *, style: str) -> SearchStrategy[RefusedLinearCase]:
    """Cases whose x does not fit the weight, which every rank can tell from what it holds."""
    return _refused_linear_cases(space, style)


def refused_fetch_cases(space: Space) -> SearchStrategy[RefusedFetchCase]:
    """Cases whose parameters cannot be fetched together; every parameter has elements."""
    return _refused_fetch_cases(space)


@st.composite
def _linear_cases(draw: DrawFn, space: Space, style: str) -> LinearCase:
    world_size = _pick(draw, "world_size", space.world_sizes)
    dtype = _pick(draw, "dtype", space.dtypes)
    leading = _pick_shape(draw, "leading", world_size, NUM_LEADING_DIMS)
    in_features = _pick(draw, "in_features", edge_sizes(world_size))
    out_features = _pick(draw, "out_features", edge_sizes(world_size))
    bias = _pick(draw, "bias", (False, True, True, True))
    shards = tuple(f"shard({dim})" for dim in range(len(leading) + 1))
    whole = ("replicate",) * 2 + (*shards, shards[-1])
    by_features = ("replicate", *shards, shards[-1], shards[-1])
    input_layout = _pick(draw, "input_layout", whole if style == "colwise" else by_features)
    output_layout = _pick(draw, "output_layout", by_features if style == "colwise" else whole)
    return LinearCase(
        style=style,
        world_size=world_size,
        dtype=dtype,
        leading=leading,
        in_features=in_features,
        out_features=out_features,
        bias=bias,
        input_layout=input_layout,
        output_layout=output_layout,
        x_is_dtensor=_pick_x_is_dtensor(draw, (*leading, in_features), input_layout, world_size),
        use_local_output=_pick(draw, "use_local_output", (True, False)),
        requires_grad=_pick(draw, "requires_grad", _subsets(("x", "weight", "bias") if bias else ("x", "weight"))),
        x_contiguous=_pick(draw, "x_contiguous", (True, False)),
        cotangent_contiguous=_pick(draw, "cotangent_contiguous", (True, False)),
        values=_pick_values(draw, LINEAR_MODES),
        poison=_pick(draw, "poison", POISON_TABLE),
        repeats=_pick(draw, "repeats", REPEATS),
        records=_pick(draw, "records", RECORDS),
        members=_pick_members(draw, world_size),
    )


@st.composite
def _fetch_cases(draw: DrawFn, space: Space, collective: str) -> FetchCase:
    world_size = _pick(draw, "world_size", space.world_sizes)
    dtype = _pick(draw, "dtype", space.dtypes)
    num_parameters = _pick(draw, "num_parameters", NUM_PARAMETERS)
    picked = [_pick_parameter(draw, f"parameter {index}", world_size) for index in range(num_parameters)]
    no_padding = _pick(draw, "no padding", (False, False, False, True))
    return FetchCase(
        world_size=world_size,
        dtype=dtype,
        parameters=tuple(_without_padding(shape, world_size) if no_padding else shape for shape, _ in picked),
        requires_grad=tuple(flag for _, flag in picked),
        padding=_pick(draw, "padding", PADDINGS),
        contiguous=_pick(draw, "contiguous", (True, False)),
        values=_pick_values(draw, FETCH_MODES),
        poison=_pick(draw, "poison", POISON_TABLE),
        repeats=_pick(draw, "repeats", REPEATS),
        collective=collective,
        records=_pick(draw, "records", RECORDS if collective else (False,)),
        members=_pick_members(draw, world_size),
    )


@st.composite
def _mlp_cases(draw: DrawFn, space: Space) -> MlpCase:
    activation = _pick(draw, "activation", ACTIVATIONS)
    exact, curved = _pick_values(draw, MLP_MODES), _pick_values(draw, CURVED_MODES, "curved ")
    return MlpCase(activation=activation, values=exact if activation == "relu" else curved, **_pick_mlp(draw, space))


@st.composite
def _training_cases(draw: DrawFn, space: Space) -> MlpCase:
    fields = _pick_mlp(draw, space)
    if not any(name.endswith(("weight", "bias")) for name in fields["requires_grad"]):
        fields["requires_grad"] = ("in_proj.weight", "out_proj.weight")
    adamw = _pick(draw, "adamw", (False, False, True)) and fields["dtype"] != "float16"
    return MlpCase(
        **fields,
        **_pick_training(draw, adamw=adamw),
        optimizer="adamw" if adamw else "sgd",
        values=_pick_values(draw, TRAINING_MODES),
    )


@st.composite
def _data_parallel_cases(draw: DrawFn, space: Space, style: str, fetch: str) -> DataParallelCase:
    fields = _pick_perceptron(draw, space)
    if not any(name.endswith(("weight", "bias")) for name in fields["requires_grad"]):
        fields["requires_grad"] = ("in_proj.weight", "out_proj.weight")
    optimizer = _pick(draw, "optimizer", DATA_PARALLEL_OPTIMIZERS)
    optimizer = "sgd" if optimizer == "adamw" and fields["dtype"] == "float16" else optimizer
    trains, activation = optimizer != "none", _pick(draw, "activation", ACTIVATIONS)
    training = _pick_training(draw, adamw=optimizer == "adamw")
    exact, curved = _pick_values(draw, MLP_MODES), _pick_values(draw, CURVED_MODES, "curved ")
    trained = _pick_values(draw, TRAINING_MODES, "training ")
    flags = {name: _pick(draw, name, (False, True)) for name in ("syncs_every", "small_buckets", "views")}
    reshards, padding = _pick(draw, "reshards", (True, False)), _pick(draw, "padding", PADDINGS)
    return DataParallelCase(
        **fields | (training if trains else {}),
        style=style,
        leading=(_pick(draw, "rows", ROWS), *_pick(draw, "more dims", ((), (), (2,), (3,)))),
        micro_batches=_pick(draw, "micro_batches", MICRO_BATCHES),
        syncs_every=style == "fsdp2" and flags["syncs_every"],
        reshards=style != "fsdp2" or reshards,
        small_buckets=style == "ddp" and flags["small_buckets"],
        views=style == "ddp" and flags["views"],
        padding=padding if style == "zero3" else "nan",
        fetch=fetch,
        records=_pick(draw, "records", RECORDS if fetch else (False,)),
        activation=activation,
        optimizer=optimizer,
        values=curved if activation != "relu" else trained if trains else exact,
    )


def _pick_training(draw: DrawFn, *, adamw: bool) -> dict[str, Any]:
    """Steps, and what an optimizer takes."""
    momentum = _pick(draw, "momentum", MOMENTA)
    return {
        "steps": _pick(draw, "steps", (2, 2, 2, 3)),
        "lr": _pick(draw, "lr", LEARNING_RATES),
        "momentum": 0.0 if adamw else momentum,
        "weight_decay": _pick(draw, "weight_decay", WEIGHT_DECAYS),
        "foreach": _pick(draw, "foreach", (False, True)),
    }


def _pick_mlp(draw: DrawFn, space: Space) -> dict[str, Any]:
    """All fields of an MlpCase that one forward and backward has, but for its activation and values.

    Where the hidden activation is a plain tensor, torch takes its global size to be local size
    times ranks and refuses others: three in four of these cases are even.
    """
    fields = _pick_perceptron(draw, space)
    world_size, hidden = fields["world_size"], fields["hidden_features"]
    leading = _pick_shape(draw, "leading", world_size, NUM_SEQUENCE_DIMS)
    sequence_dim = _pick(draw, "sequence_dim", LARGE_DIMS) % len(leading)
    use_local_output = _pick(draw, "use_local_output", (True, False, False))
    rounded = _pick(draw, "even hidden", (False, True, True, True)) and use_local_output
    x_is_dtensor = _pick(draw, "x_is_dtensor", (False, True))
    return {
        **fields,
        "leading": leading,
        "sequence_dim": sequence_dim,
        "hidden_features": -(-hidden // world_size) * world_size if rounded else hidden,
        "x_is_dtensor": x_is_dtensor or leading[sequence_dim] % world_size != 0,
        "use_local_output": use_local_output,
        "records": _pick(draw, "records", RECORDS),
    }


def _pick_perceptron(draw: DrawFn, space: Space) -> dict[str, Any]:
    """The fields of any perceptron, but for its leading dims, training, activation and values."""
    world_size = _pick(draw, "world_size", space.world_sizes)
    biases = _pick(draw, "biases", BIASES)
    names = tuple(f"{layer}.{kind}" for layer in LAYERS for kind in ("weight", "bias"))
    with_grad = tuple(name for name in names if name.endswith("weight") or name.partition(".")[0] in biases)
    return {
        "world_size": world_size,
        "dtype": _pick(draw, "dtype", space.dtypes),
        "in_features": _pick(draw, "in_features", FEATURES),
        "hidden_features": _pick(draw, "hidden_features", edge_sizes(world_size)),
        "out_features": _pick(draw, "out_features", FEATURES),
        "biases": biases,
        "requires_grad": _pick(draw, "requires_grad", _subsets(("x", *with_grad))),
        "x_contiguous": _pick(draw, "x_contiguous", (True, False)),
        "cotangent_contiguous": _pick(draw, "cotangent_contiguous", (True, False)),
        "poison": _pick(draw, "poison", POISON_TABLE),
        "repeats": _pick(draw, "repeats", REPEATS),
        "members": _pick_members(draw, world_size),
    }


@st.composite
def _embedding_cases(draw: DrawFn, space: Space, style: str) -> EmbeddingCase:
    fields = _pick_embedding(draw, space)
    world_size, leading = fields["world_size"], fields["leading"]
    shards = tuple(f"shard({dim})" for dim in range(len(leading) + 1))
    input_layout = _pick(draw, "input_layout", ("replicate", "replicate", *shards[:-1]))
    padded = _pick(draw, "padded", PADDED)
    padding_idx = _pick(draw, "padding_idx", edge_sizes(world_size)) % fields["num_embeddings"]
    return EmbeddingCase(
        style=style,
        **fields,
        input_layout=input_layout,
        output_layout=_pick(draw, "output_layout", ("replicate", "replicate", *shards)),
        ids_dtype=_pick(draw, "ids_dtype", ("int64", "int64", "int64", "int32")),
        ids_is_dtensor=_pick_x_is_dtensor(draw, leading, input_layout, world_size),
        use_local_output=_pick(draw, "use_local_output", (True, False)),
        padding_idx=padding_idx if padded else NO_PADDING,
        scale_grad_by_freq=_pick(draw, "scale_grad_by_freq", (False, False, False, True)),
        requires_grad=_pick(draw, "requires_grad", _subsets(("weight",))),
        ids_contiguous=_pick(draw, "ids_contiguous", (True, False)),
        cotangent_contiguous=_pick(draw, "cotangent_contiguous", (True, False)),
        values=_pick_values(draw, EMBEDDING_MODES),
        poison=_pick(draw, "poison", POISON_TABLE),
        repeats=_pick(draw, "repeats", REPEATS),
        records=_pick(draw, "records", RECORDS),
        members=_pick_members(draw, world_size),
    )


@st.composite
def _norm_cases(draw: DrawFn, space: Space, norm: str) -> NormCase:
    world_size = _pick(draw, "world_size", space.world_sizes)
    dtype = _pick(draw, "dtype", space.dtypes)
    leading = _pick_shape(draw, "leading", world_size, NUM_SEQUENCE_DIMS)
    sequence_dim = _pick(draw, "sequence_dim", LARGE_DIMS) % len(leading)
    if dtype in ("bfloat16", "float16"):
        leading = tuple(
            min(size, MAX_TOKENS_IN_16_BITS) if dim == sequence_dim else 1 for dim, size in enumerate(leading)
        )
    num_parameters = _pick(draw, "num_parameters", (0, 1, 2, 2, 2))
    parameters = PARAMETERS[: min(num_parameters, 2 if norm == "layer_norm" else 1)]
    x_is_dtensor = _pick(draw, "x_is_dtensor", (False, True))
    return NormCase(
        norm=norm,
        world_size=world_size,
        dtype=dtype,
        leading=leading,
        sequence_dim=sequence_dim,
        features=_pick(draw, "features", NORM_FEATURES),
        parameters=parameters,
        eps=_pick(draw, "eps", EPSILONS),
        x_is_dtensor=x_is_dtensor or leading[sequence_dim] % world_size != 0,
        use_local_output=_pick(draw, "use_local_output", (False, True)),
        requires_grad=_pick(draw, "requires_grad", _subsets(("x", *parameters))),
        x_contiguous=_pick(draw, "x_contiguous", (True, False)),
        cotangent_contiguous=_pick(draw, "cotangent_contiguous", (True, False)),
        values=_pick_values(draw, NORM_MODES),
        poison=_pick(draw, "poison", POISON_TABLE),
        repeats=_pick(draw, "repeats", REPEATS),
        records=_pick(draw, "records", RECORDS),
        members=_pick_members(draw, world_size),
    )


@st.composite
def _refused_embedding_cases(draw: DrawFn, space: Space, style: str) -> RefusedEmbeddingCase:
    """Of any layout, but of ids that no rank must be told the global shape of."""
    fields = _pick_embedding(draw, space)
    return RefusedEmbeddingCase(
        misfit=_pick(draw, "misfit", MISFITS),
        style=style,
        **fields,
        output_layout=_pick(draw, "output_layout", ("replicate", f"shard({len(fields['leading'])})")),
        values=_pick_values(draw, REFUSED_MODES),
    )


def _pick_embedding(draw: DrawFn, space: Space) -> dict[str, Any]:
    """World size, dtype and sizes of an embedding."""
    world_size = _pick(draw, "world_size", space.world_sizes)
    return {
        "world_size": world_size,
        "dtype": _pick(draw, "dtype", space.dtypes),
        "leading": _pick_shape(draw, "leading", world_size, NUM_LEADING_DIMS),
        "num_embeddings": _pick(draw, "num_embeddings", edge_sizes(world_size)),
        "embedding_dim": _pick(draw, "embedding_dim", edge_sizes(world_size)),
    }


@st.composite
def _refused_linear_cases(draw: DrawFn, space: Space, style: str) -> RefusedLinearCase:
    world_size = _pick(draw, "world_size", space.world_sizes)
    dtype = _pick(draw, "dtype", space.dtypes)
    misfit = _pick(draw, "misfit", REFUSALS)
    leading = (_pick(draw, "leading", edge_sizes(world_size)),)
    in_features = _pick(draw, "in_features", edge_sizes(world_size))
    # Where x has a feature too many, its shards along them would fit the weight's on some ranks,
    # and a DTensor would state the shape that x should have.
    any_layout = misfit == "dtype"
    input_layout = _pick(draw, "input_layout", ("replicate", "shard(1)" if style == "rowwise" else "replicate"))
    input_layout = input_layout if any_layout else "replicate"
    x_is_dtensor = _pick_x_is_dtensor(draw, (*leading, in_features), input_layout, world_size)
    return RefusedLinearCase(
        misfit=misfit,
        style=style,
        world_size=world_size,
        dtype=dtype,
        leading=leading,
        in_features=in_features,
        out_features=_pick(draw, "out_features", edge_sizes(world_size)),
        bias=_pick(draw, "bias", (False, True)),
        input_layout=input_layout,
        output_layout=_pick(draw, "output_layout", ("replicate", "shard(1)")),
        x_is_dtensor=x_is_dtensor and any_layout,
        values=_pick_values(draw, REFUSED_MODES),
    )


@st.composite
def _refused_fetch_cases(draw: DrawFn, space: Space) -> RefusedFetchCase:
    world_size = _pick(draw, "world_size", space.world_sizes)
    dtype = _pick(draw, "dtype", space.dtypes)
    misfit = _pick(draw, "misfit", MISFITS_OF_FETCH)
    num_parameters = _pick(draw, "num_parameters", (2, 3) if misfit == "dtype" else (1, 2, 3))
    parameters = [_pick_shape(draw, f"parameter {index}", world_size, NUM_PARAMETER_DIMS) for index in range(3)]
    return RefusedFetchCase(
        misfit=misfit,
        world_size=world_size,
        dtype=dtype,
        parameters=tuple(parameters[:num_parameters]),
        requires_grad=(True,) * num_parameters,
        values=_pick_values(draw, REFUSED_MODES),
    )


@cache
def edge_sizes(world_size: int) -> tuple[int, ...]:
    """Sizes of a dim, ascending, those that do not divide by the world size more often."""
    w = world_size
    near = {size + step for size in (w, 2 * w, 3 * w, w * w) for step in (-1, 0, 1)} | {1, 2, 3, 5, 7, 8}
    edges = {size for size in near if 1 <= size <= max(MAX_EDGE, w + 1)}
    empty = {size for size in range(1, MAX_EDGE) if shard_bounds(size, w, w - 1) == (size, size)}
    uneven = {size for size in edges | empty if size % w}
    even = edges - uneven
    return tuple(sorted([*uneven, *uneven, *even, *(uneven | TILE_SIZES), *(even if w > 2 else ())]))


@cache
def _subsets(names: tuple[str, ...]) -> tuple[tuple[str, ...], ...]:
    """All names five times, then every other subset once, the empty one last."""
    others = [subset for num in range(len(names) - 1, -1, -1) for subset in combinations(names, num)]
    return (names,) * 5 + tuple(others)


def _pick(draw: DrawFn, name: str, table: Sequence[T]) -> T:
    """An entry of `table`; `name` must be another one at every call for the same case.

    Entries carry the name, because Hypothesis takes draws from equal tables for the same thing: it
    then spends five examples in six on copies of one, with one draw repeated at another's place.
    Source: ConjectureRunner.generate_mutations_from, Hypothesis 6.170.
    """
    return draw(st.sampled_from(tuple((name, entry) for entry in table)))[1]


def _pick_shape(draw: DrawFn, name: str, world_size: int, num_dims_table: tuple[int, ...]) -> Shape:
    """A shape with an edge size in one dim, any one, beside small ones."""
    num_dims = _pick(draw, f"{name}: dims", num_dims_table)
    max_size = MAX_INNER if num_dims > 2 else max(edge_sizes(world_size))
    edge = _pick(draw, f"{name}: edge", [size for size in edge_sizes(world_size) if size <= max_size])
    large_dim = _pick(draw, f"{name}: large dim", LARGE_DIMS)
    small = [_pick(draw, f"{name}: dim {dim}", SMALL_SIZES) for dim in range(max(num_dims_table) - 1)]
    if num_dims == 0:
        return ()
    shape = [min(size, 2) if num_dims > 2 else size for size in small[: num_dims - 1]]
    shape.insert(large_dim % num_dims, edge)
    return tuple(shape)


def _pick_parameter(draw: DrawFn, name: str, world_size: int) -> tuple[Shape, bool]:
    """A parameter's shape, one in sixteen without elements, and its flag.

    Drawn in one go: shrinking drops a parameter by dropping its draws.
    """
    shape = _pick_shape(draw, name, world_size, NUM_PARAMETER_DIMS)
    zero_numel = _pick(draw, f"{name}: zero numel", ZERO_NUMEL_SHAPES)
    requires_grad = _pick(draw, f"{name}: requires_grad", (True, True, False))
    return (shape if zero_numel is None else zero_numel), requires_grad


def _without_padding(shape: Shape, world_size: int) -> Shape:
    """The shape, its first dim made longer where its numel is no multiple of the world size."""
    if math.prod(shape) % world_size == 0:
        return shape
    return (shape[0] * world_size, *shape[1:]) if shape else (world_size,)


def _pick_x_is_dtensor(draw: DrawFn, shape: Shape, input_layout: str, world_size: int) -> bool:
    """True where torch could not tell the global shape from a plain tensor, else either."""
    needed = shard_kind(shape, Layout((parse_placement(input_layout),)), (world_size,)) != "even"
    return _pick(draw, "x_is_dtensor", (False, True)) or needed


def _pick_members(draw: DrawFn, world_size: int) -> tuple[int, ...]:
    """The whole world, or one time in six a mesh within a larger one or in another order."""
    meshes = MEMBERS.get(world_size, (tuple(reversed(range(world_size))),))
    drawn = _pick(draw, "members", MEMBERS_DRAWN)
    return () if drawn is None else meshes[drawn % len(meshes)]


def _pick_values(draw: DrawFn, modes_table: tuple[tuple[str, ...], ...], name: str = "") -> tuple[tuple[str, int], ...]:
    """(mode, seed) of each draw of values."""
    modes = _pick(draw, f"{name}modes", modes_table)
    seeds = [_pick(draw, f"{name}seed {index}", SEEDS) for index in range(len(modes_table[-1]))]
    return tuple(zip(modes, seeds, strict=False))
