"""Draws cases of a perceptron under data parallelism."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from equivtest.cases.picks import RECORDS, REFUSED_MODES, Cases, Draw, is_several, pick, pick_values
from equivtest.families.training.data_parallel.case import WRAPPERS, DataParallelCase
from equivtest.families.training.data_parallel.case_refused import MISFITS, RefusedShardingCase
from equivtest.families.training.strategy import (
    ACTIVATIONS,
    CURVED_MODES,
    FEATURES,
    MLP_MODES,
    TRAINING_MODES,
    _pick_perceptron,
    _pick_training,
)
from equivtest.families.zero3.fetch.case import PADDINGS
from equivtest.property import Space

MICRO_BATCHES = (1, 1, 2, 3)
ROWS = (1, 2, 3, 5)  # rows of one rank in one micro-batch
CLIP_NORMS = (0.0, 0.0, 0.0, 1.0, 16.0, 1024.0)  # no clipping; then limits that clip nearly always, sometimes, seldom
NORM_TYPES_DRAWN = ("2", "2", "1", "inf")
STOPPED_STEPS: tuple[tuple[int, ...], ...] = ((), (), (), (), (2,), (2, 3), (3,))
TIES_DRAWN = ("", "", "", "", "", "", "same", "transposed")
COLUMNS_DRAWN: tuple[tuple[str, ...], ...] = (
    *[()] * 9, ("in_proj.weight", "out_proj.weight"), ("in_proj.weight",), ("out_proj.weight",),
)  # fmt: skip
CHECKPOINTS_DRAWN = (*[""] * 7, "hidden", "wrapped", "in_proj", "out_proj", "hidden")
DATA_PARALLEL_OPTIMIZERS = ("none", "sgd", "sgd", "adamw")


@Cases
def refused_sharding_cases(draw: Draw, space: Space) -> RefusedShardingCase:
    """Shrinks to one rank and a dim that the weight does not have."""
    world_size = pick(draw, "world_size", space.world_sizes)
    dtype = pick(draw, "dtype", space.dtypes)
    misfit = pick(draw, "misfit", [misfit for misfit in MISFITS if misfit != "uneven" or world_size > 1])
    in_features, hidden_features = (pick(draw, name, FEATURES) for name in ("in_features", "hidden_features"))
    if misfit == "uneven" and in_features % world_size == 0:
        in_features += 1
    least = 2 if misfit == "not_contiguous" else 1
    return RefusedShardingCase(
        misfit=misfit,
        world_size=world_size,
        dtype=dtype,
        in_features=max(in_features, least),
        hidden_features=max(hidden_features, least),
        values=pick_values(draw, REFUSED_MODES),
    )


@Cases
def data_parallel_cases(draw: Draw, space: Space, *, style: str, fetch: str = "") -> DataParallelCase:
    """Draws cases, three in four of which train. In every case some parameter needs a gradient.

    Collectives are recorded only if `fetch` names the documented collective. Shrinks to one forward and backward of one
    row.
    """
    return DataParallelCase(**_pick_data_parallel(draw, space, style, fetch))


def _pick_data_parallel(
    draw: Draw, space: Space, style: str, fetch: str, ties: tuple[str, ...] = TIES_DRAWN
) -> dict[str, Any]:
    fields = _pick_perceptron(draw, space)
    fields |= _of_more_elements(fields)
    fields |= _tie(fields, pick(draw, "tied", ties))
    columns = pick(draw, "by_columns", COLUMNS_DRAWN if style == "fsdp2" else ((),))
    fields |= _shard_columns(fields, columns)
    if not any(name.endswith(("weight", "bias")) for name in fields["requires_grad"]):
        fields["requires_grad"] = ("in_proj.weight",) if fields["tied"] else ("in_proj.weight", "out_proj.weight")
    optimizer = pick(draw, "optimizer", DATA_PARALLEL_OPTIMIZERS)
    optimizer = "sgd" if optimizer == "adamw" and fields["dtype"] == "float16" else optimizer
    trains, activation = optimizer != "none", pick(draw, "activation", ACTIVATIONS)
    training = _pick_training(draw, adamw=optimizer == "adamw") | _pick_clipping(draw)
    training |= _of_few_bits(training) if fields["dtype"] == "bfloat16" else {}
    exact, curved = pick_values(draw, MLP_MODES), pick_values(draw, CURVED_MODES, "curved ")
    exact = _of_tied(exact) if fields["tied"] else exact
    trained = pick_values(draw, TRAINING_MODES, "training ")
    flags = {name: pick(draw, name, (False, True)) for name in ("syncs_every", "small_buckets", "views")}
    wrapper = pick(draw, "wrapper", WRAPPERS if style == "ddp" else ("group",))
    reshards, padding = pick(draw, "reshards", (True, False)), pick(draw, "padding", PADDINGS)
    stopped = pick(draw, "stopped_steps", STOPPED_STEPS, bool)
    of_out_proj = ("out_proj", "in_proj.weight") if fields["tied"] else ("out_proj",)
    goes_on = trains and any(name.startswith(of_out_proj) for name in fields["requires_grad"])
    own = {
        "style": style,
        "leading": (pick(draw, "rows", ROWS, is_several), *pick(draw, "more dims", ((), (), (2,), (3,)), bool)),
        "micro_batches": pick(draw, "micro_batches", MICRO_BATCHES, is_several),
        "syncs_every": style == "fsdp2" and flags["syncs_every"],
        "reshards": style != "fsdp2" or reshards,
        "small_buckets": style == "ddp" and flags["small_buckets"],
        "views": style == "ddp" and flags["views"],
        "wrapper": wrapper,
        "padding": padding if style == "zero3" else "nan",
        "stopped_steps": tuple(step for step in stopped if goes_on and step <= training["steps"]),
        "fetch": fetch,
        "records": pick(draw, "records", RECORDS if fetch else (False,)),
        "activation": activation,
        "checkpointed": pick(draw, "checkpointed", CHECKPOINTS_DRAWN),
        "optimizer": optimizer,
        "values": curved if activation != "relu" else trained if trains else exact,
    }
    return fields | (training if trains else {}) | own


def _of_more_elements(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the sizes to change to 2, because in bfloat16 a sum of one element often cancels and is inconclusive."""
    sizes = [name for name in ("out_features", "in_features", "hidden_features") if fields[name] == 1]
    return dict.fromkeys(sizes[1:], 2) if fields["dtype"] == "bfloat16" else {}


def _tie(fields: Mapping[str, Any], tied: str) -> dict[str, Any]:
    """Returns the fields that a tied weight fixes: the sizes, and the parameters that need a gradient."""
    if not tied:
        return {"tied": ""}
    size, flags = fields["hidden_features" if tied == "same" else "in_features"], fields["requires_grad"]
    sizes = {"in_features": size, "out_features": size}
    needs = {name if name != "out_proj.weight" else "in_proj.weight" for name in flags}
    names = ("x", "in_proj.weight", "in_proj.bias", "out_proj.bias")
    return {"tied": tied, **sizes, "requires_grad": tuple(name for name in names if name in needs)}


def _shard_columns(fields: Mapping[str, Any], columns: tuple[str, ...]) -> dict[str, Any]:
    """Returns `by_columns`, and the numbers of columns of these weights, rounded up to a multiple of the world size."""
    tied, sizes = fields["tied"], {"in_proj.weight": "in_features", "out_proj.weight": "hidden_features"}
    columns = tuple(name for name in columns if not tied or name == "in_proj.weight")
    changed = {sizes[name] for name in columns}
    if changed and tied:
        changed = {"in_features", "out_features"} | ({"hidden_features"} if tied == "same" else set())
    w = fields["world_size"]
    return {"by_columns": columns, **{size: -(-fields[size] // w) * w for size in changed}}


def _of_tied(values: tuple[tuple[str, int], ...]) -> tuple[tuple[str, int], ...]:
    """Replaces the modes 'wide-in' and 'wide-out', in which a tied weight, multiplied by itself, is not exact."""
    instead = {"wide-in": "wide-x", "wide-out": "wide-g"}
    return tuple((instead.get(mode, mode), seed) for mode, seed in values)


def _of_few_bits(training: Mapping[str, Any]) -> dict[str, Any]:
    """Lowers fields for bfloat16. With a momentum of 0.9, one draw in seven was inconclusive in bfloat16."""
    return {
        "lr": min(training["lr"], 0.25),
        "momentum": min(training["momentum"], 0.25),
        "weight_decay": min(training["weight_decay"], 0.25),
    }


def _pick_clipping(draw: Draw) -> dict[str, Any]:
    clip_norm, norm_type = pick(draw, "clip_norm", CLIP_NORMS, bool), pick(draw, "norm_type", NORM_TYPES_DRAWN)
    return {"clip_norm": clip_norm, "norm_type": norm_type if clip_norm else "2"}
