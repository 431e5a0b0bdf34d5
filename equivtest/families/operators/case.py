"""Defines `OperatorCase`: one call of one torch operator on DTensors, forward and backward."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from equivtest.base import limits
from equivtest.cases.case import Case, Shape, replicated, require
from equivtest.cases.case_tensor import CaseTensor
from equivtest.cases.operands import partial_axes, stacked
from equivtest.cases.rules import Dims, OneOf
from equivtest.families.operators.case_forms import Argument
from equivtest.families.operators.case_operator import BOOLS, CONTENTS, FLOATS, INDEX, WHOLE, Operator, is_content
from equivtest.families.operators.case_table import OPERATORS, Result, domain_of, kind_of, results_of, run
from equivtest.layout import Layout, Partial, parse_placement, shard_kind

EXACT_MODE, REAL_MODE = "dense", "real"
REAL_DTYPES = ("float32", "float64")
"""Dtypes for which values with a full significand are drawn.

Kernels of 16-bit dtypes also round intermediate values, for which no bound is known.
"""

MAX_AXES = 2
MAX_DIMS = 5  # a batch of volumes has five
MAX_RESULTS = 16

Placements = tuple[str, ...]


@dataclass(frozen=True, kw_only=True, repr=False)
class OperatorCase(Case):
    """Describes one call, `results = operator(*operands, **arguments)`, and the cotangents of its backward.

    DTensor chooses the placements of the results and of the operands' gradients. The harness judges each of these
    tensors under the placements that DTensor chose. These placements must be the same on every rank.

    Operands are numbered from 0.

    Attributes:
        mesh: Number of ranks along each of at most two mesh axes. If empty, the mesh has one axis of all ranks.
        operator: Name in the table (`equivtest.families.operators.case_table`).
        operands: Global shape of each operand.
        arguments: (name, value) of each argument that is no tensor.
        placements: Placements of each operand, one per mesh axis: 'replicate', 'shard(DIM)' or, only for floating-point
            operands, 'partial(OP)'. Each rank has its own term of a partial operand.
        other_dtypes: Dtype of each operand. If an entry is '', the operand has the case's dtype. If empty, all operands
            have the case's dtype.
        holds: Contents of each operand: a domain of numbers such as 'positive', 'bools', 'whole' for int64, or 'below
            5' for int64 from 0 to 4. If empty, the operator's entry of the table names the contents.
        cotangents: Placements of each result's cotangent, as for operands. If empty, all cotangents are replicated.
        requires_grad: Numbers of the operands that require a gradient.
        strided: Numbers of the operands that have their last two dims swapped in memory.
    """

    VALUE_MODES: ClassVar[tuple[str, ...]] = (EXACT_MODE, REAL_MODE)

    mesh: Annotated[Shape, Dims(0, MAX_AXES)] = ()
    operator: Annotated[str, OneOf(tuple(OPERATORS))] = "clone"
    operands: tuple[Shape, ...] = ((1,),)
    arguments: tuple[tuple[str, Argument], ...] = ()
    placements: tuple[Placements, ...] = (("replicate",),)
    other_dtypes: tuple[str, ...] = ()
    holds: tuple[str, ...] = ()
    cotangents: tuple[Placements, ...] = ()
    requires_grad: Shape = ()
    strided: Shape = ()

    def check_fields(self) -> None:
        require(
            math.prod(self.mesh_shape) == self.world_size, f"mesh must have {self.world_size} ranks, got {self.mesh}"
        )
        require(
            all(len(shape) <= MAX_DIMS and all(size >= 0 for size in shape) for shape in self.operands),
            f"operands must have at most {MAX_DIMS} dims of size 0 or more, got {self.operands}",
        )
        numbers = range(len(self.operands))
        require(
            set(self.requires_grad) | set(self.strided) <= set(numbers),
            f"requires_grad and strided must name operands, 0 to {len(numbers) - 1}, got {self.requires_grad}, "
            f"{self.strided}",
        )
        require(
            self.dtype in REAL_DTYPES or all(mode == EXACT_MODE for mode, _ in self.values),
            f"real values must be of {' or '.join(REAL_DTYPES)}, got {self.dtype}",
        )
        require(
            not self.holds or (len(self.holds) == len(self.operands) and all(map(is_content, self.holds))),
            f"holds must name for each operand one of {', '.join(CONTENTS)} or 'below NUMBER', got {self.holds}",
        )
        require(
            not self.records or self.is_documented,
            "only the collectives of a sum of an operand that is not partial, without a gradient, are documented: "
            "set records=False",
        )
        self._check_dtypes()
        self._check_placements("placements", len(numbers))
        try:
            results = self.results
        except (RuntimeError, IndexError, ValueError, TypeError) as error:
            require(False, f"{self.operator} does not take {self.operands} with {self.arguments}: {error}")  # noqa: FBT003
        require(len(results) <= MAX_RESULTS, f"a call must give at most {MAX_RESULTS} results, got {len(results)}")
        if self.cotangents:
            self._check_placements("cotangents", len(results))

    def _check_dtypes(self) -> None:
        require(
            not self.other_dtypes or len(self.other_dtypes) == len(self.operands),
            f"other_dtypes must name one dtype per operand, got {self.other_dtypes}",
        )
        known = ("", *limits.DTYPES)
        require(
            all(name in known for name in self.other_dtypes),
            f"other_dtypes must be of {known}, got {self.other_dtypes}",
        )
        require(
            not any(name for number, name in enumerate(self.other_dtypes) if self.kind_of(number) != FLOATS),
            f"other_dtypes are for operands that are numbers, got {self.other_dtypes}",
        )

    def _check_placements(self, name: str, num: int) -> None:
        given = getattr(self, name)
        require(len(given) == num, f"{name} must be {num} tuples of placements, got {given}")
        for number, texts in enumerate(given):
            require(
                len(texts) == len(self.mesh_shape),
                f"{name} must have one placement per mesh axis: {len(self.mesh_shape)}, got {texts}",
            )
            ops = {each.op for each in map(parse_placement, texts) if isinstance(each, Partial)}
            is_number = name == "cotangents" or self.kind_of(number) == FLOATS
            require(
                len(ops) <= is_number,
                f"{name} must have at most one kind of partial placement, only on floating-point tensors, got {texts}",
            )
            require(
                not any(text.startswith("flat") for text in texts),
                f"{name}: the placement flat is not for DTensors, got {texts}",
            )

    @property
    def definition(self) -> Operator:
        return OPERATORS[self.operator]

    @property
    def is_documented(self) -> bool:
        """True if torch documents the collectives of the call: of a sum without partial operands and gradients."""
        is_partial = any(text.startswith("partial") for texts in self.placements for text in texts)
        return self.operator == "sum" and not is_partial and not self.requires_grad

    @property
    def results(self) -> tuple[Result, ...]:
        dtypes = self.other_dtypes or ("",) * len(self.operands)
        named = tuple(name or self.dtype for name in dtypes)
        return results_of(self.operator, self.operands, self.arguments, named, self.holds)

    def call(self, operands: tuple[Any, ...]) -> tuple[Any, ...]:
        return run(self.operator, operands, self.arguments)

    @property
    def mesh_shape(self) -> Shape:
        return self.mesh or (self.world_size,)

    @property
    def dtypes(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((self.dtype, *filter(None, self.other_dtypes))))

    @property
    def dtypes_sent(self) -> tuple[str, ...]:
        return self.dtypes

    @property
    def fixes_layouts(self) -> bool:
        return False

    @property
    def dim(self) -> Argument:
        return dict(self.arguments).get("dim")

    def kind_of(self, number: int) -> str:
        return kind_of(self.definition, self.holds, number)

    def domain_of(self, number: int) -> str:
        return domain_of(self.definition, self.holds, number)

    def dtype_of(self, number: int) -> str:
        other = self.other_dtypes[number] if self.other_dtypes else ""
        return {INDEX: "int64", WHOLE: "int64", BOOLS: "bool"}.get(self.kind_of(number), other or self.dtype)

    def index_limit(self) -> int:
        """Size of the dim of the first operand into which the call's index points."""
        dim = self.dim
        return self.operands[0][dim if isinstance(dim, int) else 0]

    def operand_layout(self, number: int) -> Layout:
        return Layout(tuple(map(parse_placement, self.placements[number])))

    def reduction(self, name: str) -> tuple[str, int]:
        """Returns (op, number of terms) of a partial tensor such as 'operand.0', and ('', 1) for any other tensor."""
        layout = self._given(name)[1]
        axes = partial_axes(layout)
        if not axes:
            return "", 1
        placement = layout.placements[axes[0]]
        assert isinstance(placement, Partial)
        return placement.op, math.prod(self.mesh_shape[axis] for axis in axes)

    def whole_shape(self, name: str) -> Shape:
        """Returns the global shape of a tensor such as 'operand.0' or 'cotangent.0'."""
        return self._given(name)[0]

    def _given(self, name: str) -> tuple[Shape, Layout]:
        kind, _, number = name.partition(".")
        place = int(number)
        if kind == "operand":
            return self.operands[place], self.operand_layout(place)
        return self.results[place].shape, self.cotangent_layout(place)

    def cotangent_layout(self, number: int) -> Layout:
        texts = self.cotangents[number] if self.cotangents else ("replicate",) * len(self.mesh_shape)
        return Layout(tuple(map(parse_placement, texts)))

    def graded(self) -> tuple[int, ...]:
        """Returns the numbers of the operands that require a gradient and for which some result is differentiable."""
        having = {number for result in self.results for number in result.operands}
        return tuple(number for number in self.requires_grad if number in having)

    @property
    def passed_on(self) -> tuple[str, ...]:
        """Names of the results that later steps of a chain take as input. A single call has no such results."""
        return ()

    def has_gradient(self, result: Result) -> bool:
        return bool(set(result.operands) & set(self.requires_grad))

    def describe_tensors(self) -> dict[str, CaseTensor]:
        """Describes each operand, cotangent and answer. A partial tensor has one more dim per partial axis, for the
        terms.

        `refused` and `grad.refused` are the texts, of any length, by which DTensor refused the operator or its
        backward.
        """
        whole = replicated(len(self.mesh_shape))
        tensors = {
            f"operand.{number}": self._stacked(f"operand.{number}", is_contiguous=number not in self.strided)
            for number in range(len(self.operands))
        }
        cotangents = [f"cotangent.{n}" for n, result in enumerate(self.results) if self.has_gradient(result)]
        tensors |= {name: self._stacked(name, is_contiguous=True) for name in cotangents}
        outputs = {f"output.{n}": CaseTensor(each.shape, whole, "output") for n, each in enumerate(self.results)}
        gradients = {f"grad.operand.{n}": CaseTensor(self.operands[n], whole, "gradient") for n in self.graded()}
        refusals = {"refused": CaseTensor((), whole, "state"), "grad.refused": CaseTensor((), whole, "gradient")}
        return tensors | outputs | gradients | refusals

    def _stacked(self, name: str, *, is_contiguous: bool) -> CaseTensor:
        shape, layout = self._given(name)
        stack = tuple(self.mesh_shape[axis] for axis in partial_axes(layout))
        return CaseTensor((*stack, *shape), stacked(layout), is_contiguous=is_contiguous)

    @property
    def shard_kind(self) -> str:
        """Most uneven kind of shards that any operand has: 'even', 'uneven' or 'empty'."""
        kinds = {
            shard_kind(shape, self.operand_layout(number), self.mesh_shape)
            for number, shape in enumerate(self.operands)
        }
        return next(kind for kind in ("empty", "uneven", "even") if kind in kinds)

    def fixes_bits(self, draw: int) -> bool:
        return False
