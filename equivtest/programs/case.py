"""A case of your module. One named function builds the module, and another named function parallelizes it.

The unsharded module is the reference. It determines the number and shapes of parameters, and the outputs.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Annotated, Any, ClassVar, Self

from equivtest.base.functions import parts_of
from equivtest.cases.case import Shape, at_step, parts_from, require
from equivtest.cases.case_tensor import CaseTensor, Role
from equivtest.cases.rules import OneOf
from equivtest.layout import Layout, Shard, local_shape
from equivtest.programs.boundaries import boundaries_of
from equivtest.programs.fields import Arguments, Judge, Training
from equivtest.programs.inputs import BATCH, REAL, has_rows, in_numbers
from equivtest.programs.mesh import MeshCase
from equivtest.programs.outputs import OUTPUT
from equivtest.programs.reference import Fact, Facts, Program, call_builder, facts_of, with_parameters
from equivtest.programs.rows import other_sizes, outputs_have_rows
from equivtest.programs.state import WHOLE_BATCH, require_state
from equivtest.programs.steps import TOTAL_NORM, updated

__all__ = ["ModuleCase", "call_builder", "with_parameters"]

EXACT_MODE, REAL_MODE = "dense", "real"

BATCHES = ("whole", "mean of parts", "sum of parts", "parts of the whole")
"""Each rank has the whole batch, or its own rows; then gradients are averaged, added, or equal to the batch's."""

WHOLE, MEAN_OF_PARTS, SUM_OF_PARTS, PARTS_OF_WHOLE = BATCHES

ROWS = Layout((Shard(0),))
"""Layout of tensors with the rows of the batch, if each rank has different rows."""

LARGEST = {"float32": (1, 3), "float64": (1, 3, 7), "bfloat16": (1,), "float16": (1,)}
"""Largest odd integers that the strategy draws, by dtype: a dtype with few significand bits holds only small sums."""

REAL_DTYPES = ("float32", "float64")
"""Dtypes in which real numbers are drawn; kernels in 16 bits also round intermediate values, at unknown places."""


@dataclass(frozen=True, kw_only=True, repr=False)
class ModuleCase(MeshCase):
    """A module y = f(x), which is judged by y and by the gradients of x and of every parameter.

    The backward starts from a drawn cotangent of y.

    Values are odd integers or real numbers. On odd integers the reference is exact if f only adds and multiplies. The
    oracle refuses integers that some operation could round. On real numbers the reference has a bound.

    If a module takes one x, its case has x_shape and no other inputs. For any other module the case names the inputs:

        ModuleCase(..., inputs=(("ids", "ids(11)", ("batch", "seq")),), sizes=(("batch", 2), ("seq", 3)))

    The fields of `training`, `arguments`, `judge` and `world` are passed, printed and written like the case's own
    fields: `ModuleCase(..., optimizer="my.module:sgd")`.

    Attributes:
        build: 'package.module:NAME' of a function without arguments that makes the unsharded module. The module's
            parameters that require a gradient are trained.
        parallelize: 'package.module:NAME' of a function (module, mesh) -> module.
        batch: How the ranks divide the batch, one of BATCHES: see `equivtest.program`.
    """

    VALUE_MODES: ClassVar[tuple[str, ...]] = (EXACT_MODE, REAL_MODE)

    training: Training = Training()
    build: str
    parallelize: str
    arguments: Arguments = Arguments()
    batch: Annotated[str, OneOf(BATCHES)] = WHOLE
    judge: Judge = Judge()

    def __init__(self, **fields: Any) -> None:
        for name, value in parts_from(type(self), fields).items():
            object.__setattr__(self, name, value)
        self.__post_init__()

    def but(self, **changes: Any) -> Self:
        """Returns a copy with some fields changed, which may belong to a part, as `optimizer` belongs to `training`."""
        return replace(self, **changes)

    def check_fields(self) -> None:
        require(
            self.dtype in REAL_DTYPES or self.judge.by_parts or all(mode == EXACT_MODE for mode, _ in self.values),
            f"real values of a module must be of {' or '.join(REAL_DTYPES)}, got {self.dtype}: pass by_parts=True",
        )
        require(
            not self.judge.by_parts or all(mode == REAL_MODE for mode, _ in self.values),
            f"by_parts needs real values, got {self.values}: pass values=(('real', 0),)",
        )
        self.arguments.check()
        self._check_inputs()
        self._check_zero_or_none()
        self.world.check(self.world_size, self.members)
        self.training.check()
        self._check_real_steps()
        if self.has_own_rows:
            require_parts(self)
            require(
                not self.judge.by_parts or len(set(self.rows)) == 1,
                f"by_parts needs the same number of rows on every rank, got {self.rows}: take a batch of a multiple of "
                f"{self.num_parts} rows",
            )
            require_state(self)

    def _check_inputs(self) -> None:
        for name, _, shape in self.arguments.inputs:
            require(
                not self.has_own_rows or BATCH not in shape[1:],
                f"ranks can divide a batch only along the first dim, but input {name} has the shape {shape}: pass "
                "batch='whole', or judge a module that transposes this input",
            )

    def _check_zero_or_none(self) -> None:
        patterns = self.judge.zero_or_none
        names = (*self.parameter_names(), *self.real_names()) if patterns else ()
        unknown = [pattern for pattern in patterns if not any(fnmatchcase(name, pattern) for name in names)]
        require(
            not unknown,
            f"zero_or_none must name parameters or inputs with a gradient, but {''.join(unknown[:1])!r} matches none "
            f"of {', '.join(names)}",
        )

    def accepts_none(self, answer: str) -> bool:
        """True if the subject may return no gradient instead of a gradient of zeros for the tensor `answer`."""
        what, _, name = answer.partition(".")
        return what == "grad" and any(fnmatchcase(name, pattern) for pattern in self.judge.zero_or_none)

    def _check_that_outputs_train(self) -> None:
        require(
            not self.training.optimizer or bool(self.training.step) or bool(self.facts.roots),
            f"{self.build}: no output has a gradient, so the optimizer updates nothing: leave out detach() and "
            "torch.no_grad(), or training=",
        )

    def _check_real_steps(self) -> None:
        self._check_that_outputs_train()
        require(
            not self.training.is_stepped or all(mode == REAL_MODE for mode, _ in self.values),
            f"steps are judged on real values, got {self.values}: pass values=(('real', 0),)",
        )
        require(
            not self.training.step or self.batch in (WHOLE, PARTS_OF_WHOLE),
            f"a step needs batch='whole' or batch='parts of the whole', got {self.batch!r}",
        )
        require(
            bool(self.training.step) or self.batch != PARTS_OF_WHOLE,
            "batch='parts of the whole' needs a step, which divides its loss by the size of the whole batch: pass "
            "step, or another batch",
        )
        if self.training.max_norm:
            require(
                TOTAL_NORM not in self.facts.outputs,
                f"{self.build} returns an output total_norm, but a step with max_norm reports the norm under this "
                "name: rename the output, or omit it from outputs=",
            )
        if self.training.step and self.training.max_norm:
            require(
                OUTPUT not in self.facts.outputs,
                f"{self.build} must return its loss under a name, {{'loss': loss}}, because a step with max_norm "
                "reports total_norm beside it",
            )
        if self.training.step:
            require(
                bool(self.facts.loss) or not self.facts.roots,
                f"{self.build}: a step needs a loss, but with {self.takes} the module returns none: name the loss by "
                "loss=, or, for a step that only evaluates, return outputs without gradients, as under torch.no_grad()",
            )
        if self.training.steps > 1:
            changed = list(self.facts.buffers)
            require(
                not changed,
                f"{self.build}: buffer {''.join(changed[:1])} changes from step to step, which is not judged: "
                "pass steps=1, or call eval() on the module that changes it",
            )

    @property
    def is_divided(self) -> bool:
        """True if the unsharded module runs separately on the rows of each rank."""
        return self.batch in (MEAN_OF_PARTS, SUM_OF_PARTS) and self.judge.state != WHOLE_BATCH

    @property
    def has_own_rows(self) -> bool:
        return self.batch != WHOLE

    @property
    def past_open(self) -> bool:
        """True if the oracle continues from the ranks' value at a boundary even if the bound there is too wide.

        A boundary is an input or output of a submodule. See `equivtest.programs.oracle.forced`.
        """
        return False

    @property
    def fixes_layouts(self) -> bool:
        return False

    @property
    def shard_kind(self) -> str:
        """Always 'even'. The case declares no layout of parameters, and uneven rows of the batch do not count."""
        return "even"

    def on_raise(self) -> list[str]:
        return [f"{'way out':9} if parallelize does not support such a case, raise equivtest.NotSupported in it"]

    @property
    def aspects(self) -> frozenset[str]:
        """Words that describe the case for the coverage of a search."""
        sizes = tuple(size for _, size in self.arguments.sizes) or self.arguments.x_shape[:-1]
        sizes, parts = ((self.num_rows,), self.num_parts) if self.has_own_rows else (sizes, self.world_size)
        is_even = all(size % parts == 0 for size in sizes)
        return frozenset({"even" if is_even else "uneven", f"mesh {self.mesh_shape}", *self.options})

    @property
    def options(self) -> tuple[str, ...]:
        carried = parts_of(self.build)[3] | parts_of(self.parallelize)[3]
        return tuple(f"{name}={value!r}" for name, value in carried.items())

    @property
    def takes(self) -> str:
        return self.program_of(self.num_rows).takes

    @property
    def num_rows(self) -> int:
        return self.arguments.num_rows

    @property
    def trains(self) -> bool:
        return bool(self.training.optimizer)

    @property
    def num_shares(self) -> int:
        """Number of partial sums into which a sum over the batch may be split."""
        return self.world_size * self.training.micro_batches

    @property
    def needs_fresh_ranks(self) -> bool:
        return bool(self.world.set_up) and not self.world.tear_down

    @property
    def sets_up_its_ranks(self) -> bool:
        return bool(self.world.set_up)

    @property
    def rows(self) -> tuple[int, ...]:
        """Number of rows of each part of the batch, as torch.chunk divides the batch.

        Source: torch.chunk (2.13.0).
        """
        if not self.has_own_rows:
            return (self.num_rows,)
        return tuple(local_shape((self.num_rows,), ROWS, (self.num_parts,), part)[0] for part in range(self.num_parts))

    def program_of(self, num_rows: int) -> Program:
        arguments = self.arguments
        if not arguments.inputs:
            shape = (num_rows, *arguments.x_shape[1:]) if arguments.x_shape else ()
            written: tuple[tuple[str, str, Shape], ...] = (("x", REAL, shape),)
            positional: tuple[str, ...] = ("x",)
        else:
            sizes = {**dict(arguments.sizes), BATCH: num_rows}
            written = tuple((name, kind, in_numbers(shape, sizes)) for name, kind, shape in arguments.inputs)
            positional = arguments.positional
        return Program(
            self.build, written, positional, self.judge.outputs, self.judge.loss, self.dtype, not arguments.inputs
        )

    @property
    def facts(self) -> Facts:
        return facts_of(self.program)

    @property
    def program(self) -> Program:
        return self.program_of(self.rows[0] if self.is_divided else self.num_rows)

    def input_shapes(self) -> dict[str, Shape]:
        return {name: shape for name, _, shape in self.program_of(self.num_rows).inputs}

    def kinds(self) -> dict[str, str]:
        return {name: kind for name, kind, _ in self.arguments.inputs} or {"x": REAL}

    def real_names(self) -> tuple[str, ...]:
        """Returns the inputs whose gradients are judged: none with a step function, because it may scale its loss."""
        return () if self.training.step else tuple(name for name, kind in self.kinds().items() if kind == REAL)

    def row_names(self) -> tuple[str, ...]:
        inputs = self.arguments.inputs
        return tuple(name for name, _, shape in inputs if has_rows(shape)) if inputs else ("x",)

    def divided_names(self) -> tuple[str, ...]:
        return self.row_names() if self.has_own_rows else ()

    def parameter_names(self) -> tuple[str, ...]:
        """Names of the unsharded module's parameters, as `named_parameters` lists them."""
        return tuple(self.facts.parameters)

    def boundaries(self) -> Mapping[str, Fact]:
        return boundaries_of(self.program) if self.judge.by_parts else {}

    def stacked_names(self) -> tuple[str, ...]:
        """Returns the names of the judged tensors that each part of a divided batch has separately.

        Examples are buffers, and outputs that are one number. The case describes the tensors of all parts as one
        tensor, stacked along a new first dim.
        """
        if not self.is_divided:
            return ()
        own = [f"grad.{name}" for name in self.real_names() if name not in self.divided_names()]
        numbers = [name for name, fact in self.facts.outputs.items() if not fact.shape]
        return (*own, *numbers, *(f"buffer.{name}" for name in self.facts.buffers))

    def describe_tensors(self) -> dict[str, CaseTensor]:
        """Describes the tensors of every step, with whole parameters, because a module may divide them in any way."""
        given, answers = self._given_once(), self._answered_once()
        taken = sorted(given.keys() & answers.keys())
        require(not taken, f"{self.build}: {''.join(taken[:1])} is an output and a parameter: rename one")
        parameters = self.facts.parameters
        handed = {name: tensor for name, tensor in given.items() if name not in parameters}
        computed = {name: tensor for name, tensor in answers.items() if name.removeprefix("param.") not in parameters}
        for step in range(1, self.training.steps + 1):
            if step > 1:
                given |= {at_step(step, name): tensor for name, tensor in handed.items()}
                answers |= {at_step(step, name): replace(tensor, role="trained") for name, tensor in computed.items()}
            if self.trains:
                answers |= {
                    updated(step, name): self._whole(fact.shape, "trained") for name, fact in parameters.items()
                }
        return given | answers

    def _whole(self, shape: Shape, role: Role = "given") -> CaseTensor:
        return CaseTensor(shape, self.whole_layout, role)

    def _placed(self, shape: Shape, *, has_rows: bool, role: Role = "given") -> CaseTensor:
        return CaseTensor(shape, self.rows_layout if has_rows else self.whole_layout, role)

    def _given_once(self) -> dict[str, CaseTensor]:
        facts, divided, real = self.facts, self.divided_names(), self.real_names()
        given = {
            name: replace(self._placed(shape, has_rows=name in divided), needs_grad=name in real)
            for name, shape in self.input_shapes().items()
        }
        given |= {
            name: replace(self._whole(fact.shape), needs_grad=fact.requires_grad)
            for name, fact in facts.parameters.items()
        }
        if not facts.loss:
            outputs = self._output_shapes()
            given |= {
                cotangent_of(name): self._placed(outputs[name], has_rows=self.has_own_rows) for name in facts.roots
            }
        return given

    def _answered_once(self) -> dict[str, CaseTensor]:
        facts, divided, shapes = self.facts, self.divided_names(), self.input_shapes()
        with_rows = self.outputs_with_rows()
        answers = {
            name: self._placed(shape, has_rows=self.is_divided or name in with_rows, role="output")
            for name, shape in self._output_shapes().items()
        }
        if self.training.max_norm:
            answers[TOTAL_NORM] = self._whole((), "output")
        answers |= {f"param.{name}": self._whole(fact.shape, "state") for name, fact in facts.parameters.items()}
        for name in self.real_names():  # each rank has a separate gradient of a shared input
            is_own = self.is_divided and name not in divided
            shape = (self.num_parts, *shapes[name]) if is_own else shapes[name]
            answers[f"grad.{name}"] = self._placed(shape, has_rows=self.has_own_rows, role="gradient")
        answers |= {f"grad.{name}": self._whole(fact.shape, "gradient") for name, fact in facts.parameters.items()}
        answers |= {f"buffer.{name}": self._of_each(fact.shape, "state") for name, fact in facts.buffers.items()}
        for name, fact in self.boundaries().items():
            answers[name] = self._of_each(fact.shape, "gradient" if name.startswith("grad.") else "state")
        return answers

    def _of_each(self, shape: Shape, role: Role) -> CaseTensor:
        """Describes one tensor for each part of a divided batch, stacked along a new first dim."""
        shape = (self.num_parts, *shape) if self.is_divided else shape
        return self._placed(shape, has_rows=self.is_divided, role=role)

    def outputs_with_rows(self) -> tuple[str, ...]:
        """Returns the names of the outputs whose rows are divided among the ranks.

        Raises:
            Misuse: An output's shape depends on the batch in another way.
        """
        if self.is_divided or not self.has_own_rows:
            return ()
        others = tuple((size, self.program_of(size)) for size in other_sizes(self.num_rows, self.rows))
        batch = self.num_rows, self.program_of(self.num_rows)
        by_name = outputs_have_rows(batch, others, is_divided=self.num_parts > 1)
        return tuple(name for name, has_rows in by_name.items() if has_rows)

    def _output_shapes(self) -> dict[str, Shape]:
        if self.is_divided:
            return whole_outputs(self)
        return {name: fact.shape for name, fact in self.facts.outputs.items()}


def cotangent_of(output: str) -> str:
    return "cotangent" + output.removeprefix(OUTPUT)


def require_parts(case: ModuleCase) -> None:
    can_be_divided = bool(case.arguments.inputs) or bool(case.arguments.x_shape)
    require(
        not case.arguments.inputs or bool(case.divided_names()),
        f"no input has {BATCH!r} as its first dim, so the batch cannot be divided among the ranks: name that dim "
        f"{BATCH!r}, or pass batch='whole'",
    )
    what = f"{BATCH} of {case.num_rows}" if case.arguments.inputs else f"x of shape {case.arguments.x_shape}"
    way_out = f"take one of {case.num_parts} rows, such as {(case.num_parts, *case.arguments.x_shape[1:])}"
    way_out = f"take a multiple of {case.num_parts}" if case.arguments.inputs else way_out
    require(
        can_be_divided and all(case.rows),
        f"torch.chunk cannot divide {what} among {case.num_parts} ranks so that each has a row: {way_out}, or pass "
        "batch='whole'",
    )
    if case.is_divided:
        whole_outputs(case)


def whole_outputs(case: ModuleCase) -> dict[str, Shape]:
    """Returns name -> shape of each output after the rows of all ranks are joined. A number counts as one row.

    Raises:
        Misuse: the module does not take a rank's rows, or an output is not a tensor whose rows are divided.
    """
    return _whole_outputs(tuple(case.program_of(num_rows) for num_rows in case.rows), case.takes)


@functools.lru_cache(maxsize=256)
def _whole_outputs(programs: tuple[Program, ...], takes: str) -> dict[str, Shape]:
    by_rank: list[Mapping[str, Fact]] = [facts_of(program).outputs for program in programs]
    wholes = {}
    for name in by_rank[0]:
        require(
            all(outputs.keys() == by_rank[0].keys() for outputs in by_rank),
            f"{programs[0].build}: if {takes} is divided, the module returns other outputs on some ranks than on "
            "others: pass batch='whole'",
        )
        parts = [outputs[name].shape or (1,) for outputs in by_rank]
        whole = (sum(shape[0] for shape in parts), *parts[0][1:])
        divided = [local_shape(whole, ROWS, (len(parts),), rank) for rank in range(len(parts))]
        what = "outputs" if name == OUTPUT else f"{name}s"
        require(
            parts == divided,
            f"{programs[0].build}: with {takes}, divided among {len(parts)} ranks, the {what} have the shapes "
            f"{', '.join(map(str, parts))}, which do not make one tensor divided by rows: take shapes whose rows the "
            "ranks divide evenly, or pass batch='whole'",
        )
        wholes[name] = whole
    return wholes
