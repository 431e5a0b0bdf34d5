"""Defines `PerceptronCase`, the base class of every parallel style's cases.

A case fixes a perceptron of two linear layers and its training.

Letters: T tokens (product of the leading dims), K in_features, H hidden_features, N out_features.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, ClassVar

from equivtest.base import limits
from equivtest.cases.case import Shape, replicated, require
from equivtest.cases.case_tensor import CaseTensor, Role
from equivtest.cases.rules import Dims, OneOf, SomeOf, Within
from equivtest.families.training.case_steps import TrainingCase
from equivtest.layout import Layout

EXACT_MODES = ("dense", "wide-x", "wide-in", "wide-out", "wide-g")
REAL_MODES = ("real",)
ACTIVATIONS = ("relu", "gelu", "silu")
LAYERS = ("in_proj", "out_proj")
SCALARS = ("total_norm", "storages")
"""Names of the 0-dim answers that are about all parameters together."""
CHECKPOINTS = ("", "in_proj", "out_proj", "hidden", "wrapped")
TIES = ("", "same", "transposed")
ROLES: dict[str, Role] = {"output": "output", "grad": "gradient"}
"""Roles of the first step's answers, by the first part of their names.

Every other answer of that step has the role state.
"""


@dataclass(frozen=True, kw_only=True, repr=False)
class PerceptronCase(TrainingCase):
    """Describes a perceptron y = act(x W1^T + b1) W2^T + b2 and its training.

    W1 and b1 are the weight and bias of the layer in_proj, and W2 and b2 are those of the layer out_proj. Subclasses
    say which rank holds which shard. Each step has its own x and its own cotangent.

    Names of the answers, for the weight of in_proj:

        output                          the output of step 1; names of later steps begin with the step: `step2.output`
        grad.in_proj.weight             the parameter's gradient in step 1
        capture.in_proj.output          an activation: the output of in_proj in step 1
        grad.in_proj.output             the gradient of that activation
        param.in_proj.weight            the parameter before training
        step1.param.in_proj.weight      the parameter after the first update
        step1.momentum.in_proj.weight   the optimizer's state after it; AdamW's are `exp_avg` and `exp_avg_sq`
        step1.total_norm                if gradients are clipped, 0-dim: their norm before the first update
        step1.clipped.in_proj.weight    the gradient after it was clipped by that norm
        param.out_proj.weight           if the weight is tied: the same parameter, read from out_proj
        storages                        if the weight is tied, 0-dim: how many storages a rank has for it; must be 1

    Attributes:
        leading: Leading dims of the activations, one to three. x has the shape (*leading, in_features).
        biases: The layers that have a bias, in the order of LAYERS. The values of biases are not zero.
        requires_grad: Which of 'x', 'in_proj.weight', 'in_proj.bias', 'out_proj.weight' and 'out_proj.bias' need a
            gradient, in this order.
        tied: Whether both layers share one weight, which is called in_proj.weight. If 'same', out_proj uses in_proj's
            weight, so that in_features, hidden_features and out_features are equal. If 'transposed', out_proj uses the
            transpose of in_proj's weight, so that in_features and out_features are equal. If '', each layer has its own
            weight.
        checkpointed: The part that the backward computes again, so that the forward does not store its tensors. If '',
            nothing is computed again. If 'in_proj' or 'out_proj', this layer is. If 'hidden', in_proj and the
            activation are, together. If 'wrapped', each layer is, separately, in torch's wrapper module. If a layer is
            computed twice, the captures are from the second time.
        x_contiguous, cotangent_contiguous: Whether the harness passes x, or the cotangent, contiguous in memory.
    """

    VALUE_MODES: ClassVar[tuple[str, ...]] = EXACT_MODES + REAL_MODES

    leading: Annotated[Shape, Dims(1, limits.MAX_DIMS - 1)] = (1,)
    in_features: Annotated[int, Within(1, limits.MAX_FEATURES)] = 1
    hidden_features: Annotated[int, Within(1, limits.MAX_FEATURES)] = 1
    out_features: Annotated[int, Within(1, limits.MAX_FEATURES)] = 1
    biases: Annotated[tuple[str, ...], SomeOf(LAYERS)] = ()
    activation: Annotated[str, OneOf(ACTIVATIONS)] = "relu"
    requires_grad: tuple[str, ...] = ("x", "in_proj.weight", "out_proj.weight")
    tied: Annotated[str, OneOf(TIES)] = ""
    checkpointed: Annotated[str, OneOf(CHECKPOINTS)] = ""
    x_contiguous: bool = True
    cotangent_contiguous: bool = True

    def check_fields(self) -> None:
        super().check_fields()
        self._check_tie()
        known = ("x", *self.parameter_names())
        require(
            self.requires_grad == tuple(each for each in known if each in self.requires_grad),
            f"requires_grad must list some of {', '.join(known)} in this order, got {self.requires_grad}",
        )
        require(not self.trains or bool(self.trained_names()), "an optimizer needs a parameter in requires_grad")
        for mode, _ in self.values:
            exact = mode in EXACT_MODES
            require(not exact or self.activation == "relu", f"{self.activation} rounds: use mode real, not {mode}")
            require(
                not mode.startswith("wide") or not self.trains,
                f"mode {mode} leaves no bits for an update: train on dense or real values",
            )

    def _check_tie(self) -> None:
        sizes = (self.in_features, self.hidden_features, self.out_features)
        require(
            self.tied != "same" or len(set(sizes)) == 1,
            f"tied='same' needs equal in_features, hidden_features and out_features, got {sizes}",
        )
        require(
            self.tied != "transposed" or self.in_features == self.out_features,
            f"tied='transposed' needs equal in_features and out_features, got {sizes}",
        )
        wide = [mode for mode, _ in self.values if mode in ("wide-in", "wide-out")]
        require(
            not self.tied or not wide, f"a tied weight is multiplied by itself: use another mode than {', '.join(wide)}"
        )

    @property
    def num_dims(self) -> int:
        return len(self.leading) + 1

    @property
    def batch(self) -> Shape:
        """Global leading dims of x, of the activations and of the output."""
        return self.leading

    @property
    def num_averaged(self) -> int:
        """Number of ranks over which a parameter's gradient is averaged. 1 if gradients are summed."""
        return 1

    @property
    def narrowest(self) -> str:
        """The dtype that must represent all values of an exact draw, and their sums."""
        return self.dtype

    @property
    def num_sums(self) -> int:
        """Number of equal parts of the batch. Only sums over the tokens of one part must fit `narrowest`."""
        return 1

    @property
    def num_hidden_parts(self) -> int:
        """Number of ranks among which the hidden features, and each sum over hidden features, are divided."""
        return self.world_size

    def dtype_of(self, name: str) -> str:
        return self.dtype

    @property
    def hidden_requires_grad(self) -> bool:
        return any(name == "x" or name.startswith("in_proj") for name in self.requires_grad)

    def computes_hidden_again(self, step: int) -> bool:
        """True if the backward of that step recomputes in_proj and the hidden activation."""
        return self.checkpointed == "hidden" and self.hidden_requires_grad and not self.stops_at_hidden(step)

    def parameter_names(self) -> tuple[str, ...]:
        """Returns names such as 'in_proj.weight'. A tied weight has one name."""
        return tuple(name for name in self.place_names() if not self.tied or name != "out_proj.weight")

    def place_names(self) -> tuple[str, ...]:
        """Returns the names under which the module has parameters. A tied weight has two names."""
        return _place_names(self.biases)

    def parameter_at(self, place: str) -> str:
        """Returns the parameter that the module has under the name `place`. A tied weight has two places."""
        return "in_proj.weight" if self.tied and place == "out_proj.weight" else place

    def is_used_in_out_proj(self, name: str) -> bool:
        return name.startswith("out_proj") or (bool(self.tied) and name == "in_proj.weight")

    def trained_names(self) -> tuple[str, ...]:
        return tuple(name for name in self.requires_grad if name != "x")

    def stops_at_hidden(self, step: int) -> bool:
        """True if the backward of that step ends at the hidden activation, before in_proj and x."""
        return False

    def graded_names(self, step: int) -> tuple[str, ...]:
        """Returns which of x and the parameters get a gradient in that step."""
        stops = self.stops_at_hidden(step)
        return tuple(name for name in self.requires_grad if not stops or self.is_used_in_out_proj(name))

    def graded_parameters(self, step: int) -> tuple[str, ...]:
        return tuple(name for name in self.graded_names(step) if name != "x")

    def captured_names(self, step: int = 1) -> tuple[str, ...]:
        """Returns the names of one step's captured activations, and of their gradients."""
        values = ("capture.in_proj.input", "capture.in_proj.output", "capture.out_proj.input")
        has_grad = self.hidden_requires_grad and not self.stops_at_hidden(step)
        return (*values, "grad.in_proj.output", "grad.out_proj.input") if has_grad else values

    def num_updates(self, name: str, step: int) -> int:
        return sum(name in self.graded_names(each) for each in range(1, step + 1))

    def names_left(self, state: str) -> tuple[str, ...]:
        """Returns the parameters for which a rank returns `state`: 'param', or a state such as 'exp_avg'."""
        return self.trained_names()

    def names_after(self, step: int) -> Iterator[str]:
        for state in self.state_names():
            yield from (f"step{step}.{state}.{name}" for name in self.names_left(state))
        if self.tied:
            yield f"step{step}.param.out_proj.weight"

    def describe_tensors(self) -> dict[str, CaseTensor]:
        shapes, whole, parameters = self._shapes(), replicated(len(self.mesh_shape)), self.parameter_names()
        is_contiguous = {"x": self.x_contiguous, "cotangent": self.cotangent_contiguous}
        tensors = {}
        for name in self._given():
            base = base_of(name)
            layout = whole if name in parameters else self.layout_of(name, shapes[base])
            needs_grad = base in self.requires_grad
            tensors[name] = CaseTensor(shapes[base], layout, "given", needs_grad, is_contiguous.get(base, True))
        for name in self._answered():
            shape, first = shapes[base_of(name)], name.partition(".")[0]
            role = "trained" if first.startswith("step") else ROLES.get(first, "state")
            tensors[name] = CaseTensor(shape, self.layout_of(name, shape), role)
        return tensors

    def layout_of(self, name: str, shape: Shape) -> Layout:
        raise NotImplementedError

    def _shapes(self) -> dict[str, Shape]:
        """Returns the global shapes, by name without step and prefix (`base_of`)."""
        layers = {
            "in_proj": (self.hidden_features, self.in_features),
            "out_proj": (self.out_features, self.hidden_features),
        }
        x, hidden = (*self.batch, self.in_features), (*self.batch, self.hidden_features)
        output = (*self.batch, self.out_features)
        shapes: dict[str, Shape] = {"x": x, "cotangent": output, "output": output, "grad.x": x}
        shapes |= dict.fromkeys(SCALARS, ())
        for name in self.place_names():
            layer, _, kind = self.parameter_at(name).partition(".")
            shapes[name] = layers[layer] if kind == "weight" else layers[layer][:1]
        for name in self.captured_names():
            shapes[name] = x if name == "capture.in_proj.input" else hidden
        return shapes

    def _given(self) -> Iterator[str]:
        yield from ("x", *self.parameter_names(), "cotangent")
        yield from (f"step{step}.{name}" for step in range(2, self.steps + 1) for name in ("x", "cotangent"))

    def _answered(self) -> Iterator[str]:
        yield from ("output", *(f"param.{name}" for name in self.place_names()), *(("storages",) if self.tied else ()))
        yield from self._answered_later()

    def _answered_later(self) -> Iterator[str]:
        """Yields the names of the answers, in the order of the run, except those of `_answered`."""
        yield from self._once(1)
        for step in range(1, self.steps + 1 if self.trains else 1):
            if self.clips:
                left = (f"clipped.{name}" for name in self.graded_parameters(step))
                yield from (f"step{step}.{name}" for name in ("total_norm", *left))
            yield from self.names_after(step)
            if step < self.steps:
                yield from (f"step{step + 1}.{name}" for name in ("output", *self._once(step + 1)))

    def _once(self, step: int) -> tuple[str, ...]:
        return (*self.captured_names(step), *(f"grad.{name}" for name in self.graded_names(step)))


@functools.cache  # called for every tensor of every case
def _place_names(biases: tuple[str, ...]) -> tuple[str, ...]:
    kinds = [(layer, kind) for layer in LAYERS for kind in ("weight", "bias")]
    return tuple(f"{layer}.{kind}" for layer, kind in kinds if kind == "weight" or layer in biases)


@functools.lru_cache(maxsize=2**12)  # called for every tensor of every case
def base_of(name: str) -> str:
    """Returns a name without step and prefix: 'in_proj.weight' for 'step2.grad.in_proj.weight'.

    Gradients and captures of activations keep their prefix, as in 'grad.x' and 'capture.in_proj.output'.
    """
    parts = name.split(".")
    if parts[0].startswith("step"):
        parts = parts[1:]
    if parts[-1] in ("weight", "bias"):
        parts = parts[-2:]
    return ".".join(parts)
