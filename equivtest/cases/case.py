"""The base of every case: plain frozen data that fixes one example, and its written form."""

from __future__ import annotations

import ast
import dataclasses
import math
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Annotated, Any, ClassVar, TypeVar

import msgspec

from equivtest.base import limits
from equivtest.cases.axes import MEMBERS_OF_WORLD, POISON_TABLE, RECORDS, REPEATS, table
from equivtest.cases.case_tensor import CaseTensor
from equivtest.cases.parts import modules_of
from equivtest.cases.rules import OneOf, Within, broken_rules
from equivtest.errors import Misuse, shorten
from equivtest.layout import Layout, Replicate, check_layout, shard_kind

SCHEMA_VERSION = 1
"""Version of a written case.  It rises when a reader of the old form would misread the new one."""

INFINITY, CODE_OF_INFINITY = "inf", "float('inf')"
"""JSON form, and code, of a field with the value infinity."""

CASE_TYPES: dict[str, type[Case]] = {}
"""Name -> case class, for every imported case class.  `Case.__init_subclass__` fills it."""

C = TypeVar("C", bound="Case")
Shape = tuple[int, ...]

POISONS = ("large", "nan", "none")
"""What ranks write into memory that no code has written to yet (`equivtest.ranks.poison`)."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """A group of fields that belong together, such as the fields of training.

    `repr` and JSON write these fields among the case's other fields.  A case declares a part with a default: `training:
    Training = Training()`.
    """

    def __post_init__(self) -> None:
        for message in broken_rules(self):
            raise Misuse(message)


@dataclass(frozen=True, kw_only=True, repr=False)
class Case:
    """One example as plain data: the layout of its tensors, and one or more draws of values for them.

    A subclass describes the tensors (`describe_tensors`).  The tensors have fixed names: the harness passes tensors
    such as `x`, `weight` and `cotangent`, and a subject returns tensors such as `output`, `grad.x` and `param.weight`.
    The values of fields are numbers, strings, bools and tuples of these, so that `repr` is code and JSON loses nothing.

    A new case is checked in this order: the rules of each field (`cases.rules`), `check_fields`, the shapes and layouts
    of each tensor, and `check_layouts`.

    Attributes:
        world_size: Number of ranks, from 1 to limits.MAX_WORLD_SIZE.
        dtype: Name of the dtype of every tensor, one of limits.DTYPES.
        values: (mode, seed) of each draw. The class's VALUE_MODES lists the modes.
        poison: Value with which the ranks fill new memory: 'large' for large finite numbers, 'nan',
            or 'none' to leave the memory as it is.
        repeats: True if the ranks run draw 0 once more after all other draws.
        records: True if the ranks record the collectives of the subject.  The value True is seldom drawn, so that most
            cases judge the backend without the recorder.
        members: The processes of the mesh, in mesh order. If `members` is (3, 1), rank 0 is process 3. At the same time
            the other processes of the world run the case too, in as many meshes of the same size as they can fill: see
            `groups`. If empty, the mesh is the world, in order.
    """

    VALUE_MODES: ClassVar[tuple[str, ...]] = ("dense",)
    MODES_DRAWN: ClassVar[tuple[tuple[str, ...], ...]] = ()
    """Combinations of modes for the draws of one case, the simplest first.  If empty, `modes_drawn` chooses them."""

    world_size: Annotated[int, Within(1, limits.MAX_WORLD_SIZE)]
    dtype: Annotated[str, OneOf(tuple(limits.DTYPES))] = "float32"
    values: tuple[tuple[str, int], ...] = (("dense", 0),)
    poison: Annotated[str, OneOf(POISONS), table(*POISON_TABLE)] = "large"
    repeats: Annotated[bool, table(*REPEATS)] = False
    records: Annotated[bool, table(*RECORDS)] = False
    members: Annotated[tuple[int, ...], MEMBERS_OF_WORLD] = ()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        CASE_TYPES[cls.__name__] = cls

    def __post_init__(self) -> None:
        for message in broken_rules(self):
            raise Misuse(message)
        require(len(self.values) > 0, "values must hold at least one (mode, seed)")
        for mode, seed in self.values:
            require(mode in self.VALUE_MODES, f"mode must be one of {', '.join(self.VALUE_MODES)}, got {mode!r}")
            require(seed >= 0, f"a seed must be at least 0, got {seed}")
        self._check_members()
        self.check_fields()
        for name, tensor in self.tensors.items():
            numel = math.prod(tensor.shape)
            require(numel <= limits.MAX_NUMEL, f"{name} must have at most {limits.MAX_NUMEL} elements, got {numel}")
            try:
                check_layout(tensor.shape, tensor.layout, self.mesh_shape)
            except ValueError as error:
                raise Misuse(f"{name}: {error}") from error
        self.check_layouts()

    @classmethod
    def modes_drawn(cls) -> tuple[tuple[str, ...], ...]:
        """Lists combinations of modes for the draws of one case.  The combination of all modes is the most frequent."""
        return cls.MODES_DRAWN or (*((mode,) for mode in cls.VALUE_MODES), *[cls.VALUE_MODES] * 16)

    def check_fields(self) -> None:
        """Raises Misuse unless the fields fit each other. The rules of each single field were checked before."""

    def check_layouts(self) -> None:
        """Raises Misuse unless the tensors fit each other. The layout of each single tensor was checked before."""

    def __repr__(self) -> str:
        """Returns code that makes the case again.  Fields with their default value are left out.

        Subclasses pass repr=False to `dataclass`, so that they inherit this method.
        """
        defaults = defaults_of(type(self))
        code = [f"{name}={_code_of(value)}" for name, value in fields_of(self).items() if value != defaults[name]]
        return f"{type(self).__name__}({', '.join(code)})"

    def _check_members(self) -> None:
        if not self.members:
            return
        require(
            len(self.members) == len(set(self.members)) == self.world_size,
            f"members must be {self.world_size} different processes, one per rank, got {self.members}",
        )
        require(
            all(0 <= process < limits.MAX_WORLD_SIZE for process in self.members),
            f"members must be in 0..{limits.MAX_WORLD_SIZE - 1}, got {self.members}",
        )
        require(len(self.mesh_shape) == 1, f"members need a mesh of one axis, got {self.mesh_shape}")

    @property
    def mesh_shape(self) -> Shape:
        """Number of ranks along each mesh axis."""
        return (self.world_size,)

    @property
    def axes(self) -> tuple[str, ...]:
        """Names of the mesh axes, or () if the axes have no names."""
        return ()

    @property
    def dtypes(self) -> tuple[str, ...]:
        """Names of the dtypes in which the subject computes."""
        return (self.dtype,)

    def is_within(self, dtypes: Collection[str]) -> bool:
        """True if the case needs only `dtypes`."""
        return set(self.dtypes) <= set(dtypes)

    @property
    def num_processes(self) -> int:
        """Number of processes of the smallest world in which the case can run."""
        return max(self.members) + 1 if self.members else self.world_size

    @property
    def dtypes_sent(self) -> tuple[str, ...]:
        """Dtypes of the tensors that ranks send to each other."""
        return (self.dtype,)

    @property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """Processes of each mesh that runs the case, in mesh order.  The first mesh is `members`.

        If the remaining processes are too few for another mesh, they run nothing.
        """
        if not self.members:
            return (tuple(range(self.world_size)),)
        others = [process for process in range(self.num_processes) if process not in self.members]
        starts = range(0, len(others) - self.world_size + 1, self.world_size)
        return (self.members, *(tuple(others[start : start + self.world_size]) for start in starts))

    def on_raise(self) -> list[str]:
        """Returns lines of advice for the message of a failure in which the subject raises on every rank."""
        return []

    def name_rank(self, process: int) -> str:
        """Returns 'rank 1 of 2', or 'rank 1 of 2 (process 3)' if processes have other numbers than ranks."""
        if not self.members:
            return f"rank {process} of {self.world_size}"
        group = next((group for group in self.groups if process in group), None)
        if group is None:
            return f"process {process} outside of every mesh"
        return f"rank {group.index(process)} of {self.world_size} (process {process})"

    def describe_tensors(self) -> dict[str, CaseTensor]:
        """Describes every tensor by name.

        The tensors that the subject gets come first, then the tensors that the subject must return.  Both groups have
        the order of the subject's arguments.
        """
        raise NotImplementedError

    @cached_property
    def tensors(self) -> dict[str, CaseTensor]:
        return self.describe_tensors()

    def shapes(self) -> dict[str, Shape]:
        return {name: tensor.shape for name, tensor in self.tensors.items()}

    def layouts(self) -> dict[str, Layout]:
        """Returns name -> the contract's layout of every tensor."""
        return {name: tensor.layout for name, tensor in self.tensors.items()}

    def given_names(self) -> tuple[str, ...]:
        return tuple(name for name, tensor in self.tensors.items() if tensor.is_given)

    def answer_names(self) -> tuple[str, ...]:
        """Returns the names of exactly the tensors that the subject must return."""
        return tuple(name for name, tensor in self.tensors.items() if tensor.is_answered)

    def given_flags(self) -> dict[str, bool]:
        return {name: tensor.needs_grad for name, tensor in self.tensors.items() if tensor.is_given}

    @property
    def shard_kind(self) -> str:
        """How the ranks divide the most uneven tensor of the case: 'even', 'uneven', or 'empty' for an empty shard."""
        return self.worst_shard_kind(self.tensors)

    @property
    def aspects(self) -> frozenset[str]:
        """Words that describe the case for the coverage of a search, such as 'even' or 'uneven'.

        The cases that a search draws for one world size must together have every word that the property lists.
        """
        return frozenset({"even" if self.shard_kind == "even" else "uneven"})

    def worst_shard_kind(self, names: Iterable[str]) -> str:
        placed = [self.tensors[name] for name in names]
        kinds = {shard_kind(tensor.shape, tensor.layout, self.mesh_shape) for tensor in placed}
        return next(kind for kind in ("empty", "uneven", "even") if kind in kinds)

    @property
    def trains(self) -> bool:
        """True if the subject updates parameters, so that the case may have several steps."""
        return False

    @property
    def leaves_gradients(self) -> bool:
        return any(tensor.role == "gradient" for tensor in self.tensors.values())

    def fixes_bits(self, draw: int) -> bool:
        """True if the oracle knows the right bits of at least one returned tensor in draw number `draw`.

        Claims that compare bits apply only to such draws.
        """
        return True

    @property
    def draws_at_random(self) -> bool:
        """True if the returned tensors depend on random numbers that the ranks draw, as in dropout.

        Claims that test these random numbers statistically apply only to such cases.
        """
        return False

    @property
    def needs_fresh_ranks(self) -> bool:
        """True if the case needs ranks that run nothing before the case and nothing after it."""
        return False

    @property
    def sets_up_its_ranks(self) -> bool:
        """True if the case sets up its ranks by a function.  Ranks that decline the case may keep a partial set-up."""
        return False

    @property
    def fixes_layouts(self) -> bool:
        """True if the contract fixes how parameters are divided.  If False, the subject decides this."""
        return True

    def without(self, refused: Collection[str]) -> Case | None:
        """Returns a variant of the case that calls none of the `refused` collectives ('dtype:name'), or None."""
        return None

    @property
    def refusal(self) -> str:
        """The reason why the case is outside the contract, or '' if the case is within the contract."""
        return ""


class Refused:
    """First base class of each class of cases outside the contract. Every rank must refuse such cases."""


def require(holds: bool, message: str) -> None:  # noqa: FBT001  (reads as a sentence)
    if not holds:
        raise Misuse(message)


def fields_of(case: Case | Part) -> dict[str, Any]:
    """Returns name -> value of all fields.  The fields of each part replace the part."""
    names = _names_of(case.__class__)  # type: ignore[arg-type]  # a class is hashable
    return _flat((name, getattr(case, name)) for name in names)


@cache  # `fields_of` is called for every case that a covering array tries
def _names_of(case_type: Any) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(case_type))


def defaults_of(case_type: type[Case]) -> dict[str, Any]:
    """Returns name -> default of all fields, with the fields of each part.  A missing default is MISSING."""
    return _flat((field.name, field.default) for field in dataclasses.fields(case_type))


def _flat(fields: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in fields:
        flat.update(fields_of(value) if isinstance(value, Part) else {name: value})
    return flat


def parts_from(case_type: type[Case], fields: Mapping[str, Any]) -> dict[str, Any]:
    """Puts the fields of parts into `Part`s: {'optimizer': 'm:sgd'} -> {'training': Training(optimizer='m:sgd'), ...}.

    Raises:
        TypeError: no case of this type has such a field.
    """
    rest, made = dict(fields), {}
    for field in dataclasses.fields(case_type):
        value = rest.pop(field.name, field.default)
        if isinstance(value, Part):
            changes = {each.name: rest.pop(each.name) for each in dataclasses.fields(value) if each.name in rest}
            value = dataclasses.replace(value, **changes) if changes else value
        if value is dataclasses.MISSING:
            raise TypeError(f"{case_type.__name__} needs {field.name}")
        made[field.name] = value
    if rest:
        raise TypeError(f"{case_type.__name__} has no field {', '.join(rest)}")
    return made


@cache
def replicated(num_axes: int = 1) -> Layout:
    return Layout((Replicate(),) * num_axes)


def to_data(case: Case) -> dict[str, Any]:
    return {"schema": SCHEMA_VERSION, "type": type(case).__name__, "fields": msgspec.to_builtins(_written(case))}


def _written(case: Case) -> dict[str, Any]:
    """Returns the fields in a form for JSON, which has no infinity."""
    return {name: INFINITY if value == math.inf else value for name, value in fields_of(case).items()}


def _code_of(value: Any) -> str:
    return CODE_OF_INFINITY if value == math.inf else repr(value)


def _value_of(code: ast.expr) -> Any:
    return math.inf if ast.unparse(code) in (CODE_OF_INFINITY, "math.inf", "inf") else ast.literal_eval(code)


DELETED = {
    "EmbeddingWaysCase": "EmbeddingCase judges each style",
    "ReductionCase": "OperatorCase of the subject dtensor_operators judges reductions",
}
"""Deleted case class -> what judges the same cases now."""


def from_data(data: Any) -> Case:
    """Returns the case that `to_data` wrote.  Raises Misuse if the data has another form or the case is not valid."""
    require(
        isinstance(data, dict) and {"schema", "type", "fields"} <= data.keys(),
        "a written case needs the keys 'schema', 'type' and 'fields'",
    )
    require(
        data["schema"] == SCHEMA_VERSION,
        f"the case has schema {data['schema']}, this equivtest reads {SCHEMA_VERSION}: use the version that wrote it",
    )
    if data["type"] not in list(CASE_TYPES):
        import_cases()
    require(
        str(data["type"]) not in DELETED,
        f"{data['type']} was deleted, and {DELETED.get(str(data['type']))} instead: see CHANGELOG.md",
    )
    require(
        isinstance(data["type"], str) and data["type"] in CASE_TYPES,
        f"unknown case class {data['type']!r}, known: {', '.join(sorted(CASE_TYPES))}; "
        "--import the package that defines it",
    )
    return _convert(data["fields"], CASE_TYPES[data["type"]])


def from_code(text: str) -> Case:
    """Reads a case from the code that `repr` printed, without running it.  Raises Misuse for any other text."""
    try:
        call = ast.parse(text.strip(), mode="eval").body
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.args:
            raise ValueError("not a call with keyword arguments only")
        fields = {keyword.arg: _value_of(keyword.value) for keyword in call.keywords}
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError) as error:
        why = f" ({error.msg})" if isinstance(error, SyntaxError) else ""
        raise Misuse(
            f"not the code of a case: {text!r}{why}; paste the text behind 'case' in a message, "
            "such as FetchCase(world_size=2, parameters=((5,),), requires_grad=(True,))"
        ) from error
    try:
        msgspec.json.encode(list(fields.values()))  # the form that ranks receive
    except (ValueError, TypeError, OverflowError) as error:
        raise Misuse(f"a case may hold texts, and numbers of at most 64 bits, got {text!r}: {error}") from error
    return from_data({"schema": SCHEMA_VERSION, "type": call.func.id, "fields": fields})


def at_step(step: int, name: str) -> str:
    """Returns the name that a tensor of step 1 has in another step: (2, 'output') -> 'step2.output'."""
    return name if step == 1 else f"step{step}.{name}"


def in_one_step(name: str) -> str:
    """Returns the name that a tensor of any step has in step 1: 'step2.output' -> 'output'."""
    return re.sub(r"^step\d+\.", "", name)


def import_cases() -> None:
    """Imports the case classes of every family, which adds the classes to `CASE_TYPES`."""
    for part in ("case", "case_refused"):
        modules_of(part)


def _nested(case_type: type[Case], fields: Mapping[str, Any]) -> dict[str, Any]:
    nested = dict(fields)
    for field in dataclasses.fields(case_type):
        if isinstance(field.default, Part):
            own = fields_of(field.default)
            nested[field.name] = own | {name: nested.pop(name) for name in own if name in nested}
    return nested


def _is_infinity(value: Any, default: Any) -> bool:
    return isinstance(default, float) and value == INFINITY


def _convert(fields: Any, case_type: type[C]) -> C:
    known = defaults_of(case_type)
    require(
        isinstance(fields, dict) and fields.keys() <= known.keys(),
        f"{case_type.__name__} has the fields {', '.join(sorted(known))}, got {fields!r}",
    )
    values = {name: math.inf if _is_infinity(value, known[name]) else value for name, value in fields.items()}
    try:
        return msgspec.convert(_nested(case_type, values), case_type)
    except msgspec.ValidationError as error:
        raise Misuse(f"not a valid {case_type.__name__}: {shorten(str(error))}") from error
