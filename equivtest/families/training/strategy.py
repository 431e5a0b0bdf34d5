"""Draws cases of a perceptron under sequence parallelism, for one step and for training."""

from __future__ import annotations

from typing import Any

from equivtest.cases.picks import (
    LARGE_DIMS,
    NUM_SEQUENCE_DIMS,
    POISON_TABLE,
    RECORDS,
    REPEATS,
    Cases,
    Draw,
    edge_sizes,
    free,
    modulo,
    pick,
    pick_gradients,
    pick_members,
    pick_shape,
    pick_values,
    residues,
)
from equivtest.families.training.case import LAYERS
from equivtest.families.training.sequence.case import MlpCase
from equivtest.property import Space

MLP_MODES = (
    ("dense",), ("wide-x",), ("wide-in",), ("wide-out",), ("wide-g",), ("real",),
    *[("dense", "wide-x", "wide-out", "real")] * 8, *[("dense", "wide-in", "wide-g", "real")] * 8,
)  # fmt: skip
CURVED_MODES = (("real",), *[("real", "real")] * 8)
TRAINING_MODES = (("dense",), ("real",), *[("dense", "real")] * 12)
FEATURES = (1, 2, 3, 5, 8, 10)
BIASES = ((), ("in_proj", "out_proj"), ("in_proj", "out_proj"), ("in_proj",), ("out_proj",))
ACTIVATIONS = ("relu",) * 4 + ("gelu", "silu")
LEARNING_RATES = (0.25, 0.5, 0.125, 0.25, 0.1)  # powers of two keep the first updates exact
MOMENTA = (0.0, 0.5, 0.5, 0.9)
WEIGHT_DECAYS = (0.0, 0.25, 0.5, 0.01)
VARIANTS_DRAWN = ("", "", "nesterov", "dampened", "amsgrad", "maximize")
BETWEEN_DRAWN = ("", "", "reload", "halve", "warm_up")


@Cases
def mlp_cases(draw: Draw, space: Space) -> MlpCase:
    """Shrinks to one draw of dense values for one token, with one feature in each layer, no bias, and relu."""
    activation = pick(draw, "activation", ACTIVATIONS)
    exact, curved = pick_values(draw, MLP_MODES), pick_values(draw, CURVED_MODES, "curved ")
    return MlpCase(activation=activation, values=exact if activation == "relu" else curved, **_pick_mlp(draw, space))


@Cases
def training_cases(draw: Draw, space: Space) -> MlpCase:
    """Draws two or three steps of SGD or AdamW. Shrinks to two steps of SGD without momentum and weight decay.

    AdamW is not drawn in float16, because its eps of 1e-8 is zero in float16, so a gradient of zero gives 0 / 0.
    """
    fields = _pick_mlp(draw, space)
    if not any(name.endswith(("weight", "bias")) for name in fields["requires_grad"]):
        fields["requires_grad"] = ("in_proj.weight", "out_proj.weight")
    adamw = pick(draw, "adamw", (False, False, True)) and fields["dtype"] != "float16"
    return MlpCase(
        **fields,
        **_pick_training(draw, adamw=adamw),
        optimizer="adamw" if adamw else "sgd",
        values=pick_values(draw, TRAINING_MODES),
    )


def _pick_training(draw: Draw, *, adamw: bool) -> dict[str, Any]:
    """Draws the fields of an optimizer. A variant that only the other optimizer has becomes ''."""
    momentum, variant = pick(draw, "momentum", MOMENTA, bool), pick(draw, "variant", VARIANTS_DRAWN)
    between, steps = pick(draw, "between_steps", BETWEEN_DRAWN), pick(draw, "steps", (2, 2, 2, 3))
    of_momentum = variant in ("nesterov", "dampened")
    if of_momentum if adamw else variant == "amsgrad":
        variant = ""
    momentum = momentum or 0.5 * (of_momentum and not adamw)
    return {
        "steps": 3 if between == "warm_up" else steps,
        "lr": pick(draw, "lr", LEARNING_RATES, free),
        "momentum": 0.0 if adamw else momentum,
        "weight_decay": pick(draw, "weight_decay", WEIGHT_DECAYS, bool),
        "foreach": pick(draw, "foreach", (False, True)),
        "variant": variant,
        "between_steps": between,
    }


def _pick_mlp(draw: Draw, space: Space) -> dict[str, Any]:
    """Draws the fields of an MlpCase, except activation and values.

    If the hidden activation is a plain tensor, torch computes its global size as local size times ranks and refuses
    uneven shards. So three in four of these cases are even.
    """
    fields = _pick_perceptron(draw, space)
    world_size, hidden = fields["world_size"], fields["hidden_features"]
    leading = pick_shape(draw, "leading", world_size, NUM_SEQUENCE_DIMS)
    sequence_dim = pick(draw, "sequence_dim", LARGE_DIMS, modulo(len(leading))) % len(leading)
    use_local_output = pick(draw, "use_local_output", (True, False, False))
    rounded = pick(draw, "even hidden", (False, True, True, True)) and use_local_output
    x_is_dtensor = pick(draw, "x_is_dtensor", (False, True))
    return {
        **fields,
        "leading": leading,
        "sequence_dim": sequence_dim,
        "hidden_features": -(-hidden // world_size) * world_size if rounded else hidden,
        "x_is_dtensor": x_is_dtensor or leading[sequence_dim] % world_size != 0,
        "use_local_output": use_local_output,
        "records": pick(draw, "records", RECORDS),
    }


def _pick_perceptron(draw: Draw, space: Space) -> dict[str, Any]:
    """Draws the fields of any perceptron, except leading dims, training, activation and values."""
    world_size = pick(draw, "world_size", space.world_sizes)
    biases = pick(draw, "biases", BIASES)
    names = tuple(f"{layer}.{kind}" for layer in LAYERS for kind in ("weight", "bias"))
    with_grad = tuple(name for name in names if name.endswith("weight") or name.partition(".")[0] in biases)
    return {
        "world_size": world_size,
        "dtype": pick(draw, "dtype", space.dtypes),
        "in_features": pick(draw, "in_features", FEATURES, residues(world_size)),
        "hidden_features": pick(draw, "hidden_features", edge_sizes(world_size), residues(world_size)),
        "out_features": pick(draw, "out_features", FEATURES, residues(world_size)),
        "biases": biases,
        **pick_gradients(draw, ("x", *with_grad)),
        "poison": pick(draw, "poison", POISON_TABLE),
        "repeats": pick(draw, "repeats", REPEATS),
        "members": pick_members(draw, world_size),
    }
