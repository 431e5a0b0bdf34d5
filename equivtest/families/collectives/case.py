"""Defines `CollectivesCase`: calls of collectives of torch.distributed, one after the other, on several sizes.

Letters: w ranks; n one size, which is a number of elements.

A collective takes operands of one kind, such as 'added' for a sum (OPERANDS). Every rank has one tensor of each kind:
the tensor has w * n elements for each size n, one size after the other. A collective to which a rank gives one tensor,
such as all_reduce, takes the first n of these elements. A collective to which a rank gives one tensor per rank, such as
all_to_all, takes all w * n elements.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

from equivtest.cases.case import Case, replicated, require
from equivtest.cases.case_tensor import CaseTensor
from equivtest.cases.rules import OneOf, Within
from equivtest.layout import Layout, Shard

OPERANDS = {
    "": "moved",
    "sum": "added",
    "max": "compared",
    "min": "compared",
    "avg": "averaged",
    "product": "multiplied",
    "premul": "added",
    "band": "joined",
    "bor": "joined",
    "bxor": "joined",
}
"""Reduction -> kind of operand that it takes; '' stands for copies."""

COUNTED = {"sum": "counted", "max": "joined", "min": "joined"}
"""Reduction of int64 -> kind of operand that it takes."""

FACTOR = 0.5
"""Factor of a rank's operand in 'premul', which is PREMUL_SUM."""

BITWISE = ("band", "bor", "bxor")
"""Reductions that take the operands as integers with the same bits."""

RESULTS = ("reduced", "parts", "gathered", "exchanged", "uneven")
"""Kinds of results.

'reduced': (n,), equal on every rank. 'parts': the reduction of all w * n elements, scattered, (n,) on each rank.
'gathered': (w, n), one row from each rank or from each root, equal on every rank. 'exchanged': (w, n), the elements for
this rank from each rank or from each root. 'uneven': like 'exchanged', but with `split` elements per rank, followed by
zeros up to w * n.
"""


@dataclass(frozen=True)
class Call:
    """One collective that a case calls. This is a function of torch.distributed, with its reduction if it reduces.

    Attributes:
        function: Name of a function of torch.distributed, perhaps with a prefix. The prefix 'functional_' calls the
            functional collective of that name. The prefix 'coalesced_' makes one coalesced call for all sizes of the
            case. The prefix 'int64_' calls the function on integers of dtype int64.
        op: Name of the reduction, such as 'sum'. It is a key of OPERANDS, or '' if the function copies.
        result: Kind of the result, one of RESULTS. The kind 'gathered', for example, has one row from each rank.
    """

    function: str
    result: str
    op: str = ""

    @property
    def name(self) -> str:
        return f"{self.function}_{self.op}" if self.op else self.function

    @property
    def is_coalesced(self) -> bool:
        return self.function.startswith("coalesced_")

    @property
    def lays_out_itself(self) -> bool:
        """True if the function copies its operand into memory that has the case's strides and offset.

        For any other function, the caller of the function makes that copy.
        """
        return self.is_coalesced or self.function.startswith("int64_")

    @property
    def operand(self) -> str:
        return COUNTED[self.op] if self.function.startswith("int64_") else OPERANDS[self.op]


def _reductions(function: str, result: str, ops: tuple[str, ...]) -> tuple[Call, ...]:
    return tuple(Call(function, result, op) for op in ops)


_COMMON = ("sum", "max", "min")  # every backend that reduces has these

BUNDLES: dict[str, tuple[Call, ...]] = {
    "all_reduce": _reductions("all_reduce", "reduced", (*_COMMON, *BITWISE)),
    "all_gather": (Call("all_gather", "gathered"),),
    "all_gather_into_tensor": (Call("all_gather_into_tensor", "gathered"),),
    "reduce_scatter_tensor": _reductions("reduce_scatter_tensor", "parts", _COMMON),
    "reduce_scatter": _reductions("reduce_scatter", "parts", _COMMON),
    "broadcast": (Call("broadcast", "gathered"), Call("broadcast_object_list", "gathered")),
    "scatter": (Call("scatter", "exchanged"), Call("scatter_object_list", "exchanged")),
    "gather": (
        Call("gather", "gathered"),
        Call("gather_object", "gathered"),
        Call("all_gather_object", "gathered"),
        Call("barrier", "gathered"),
        Call("monitored_barrier", "gathered"),
    ),
    "reduce": _reductions("reduce", "reduced", _COMMON),
    "all_to_all_single": (Call("all_to_all_single", "exchanged"), Call("all_to_all_single_uneven", "uneven")),
    "all_to_all": (
        Call("all_to_all", "exchanged"),
        Call("send_and_receive", "exchanged"),
        Call("batched_send_and_receive", "exchanged"),
    ),
    "tags": (Call("tagged_send_and_receive", "exchanged"),),
    "integers": (
        *_reductions("int64_all_reduce", "reduced", _COMMON),
        *_reductions("int64_reduce", "reduced", _COMMON),
        *_reductions("int64_reduce_scatter_tensor", "parts", _COMMON),
    ),
    "averages": (
        Call("all_reduce", "reduced", "avg"),
        Call("reduce_scatter_tensor", "parts", "avg"),
        Call("reduce_scatter", "parts", "avg"),
        Call("reduce", "reduced", "avg"),
        Call("functional_all_reduce", "reduced", "avg"),
        Call("functional_reduce_scatter_tensor", "parts", "avg"),
    ),
    "products": (
        Call("all_reduce", "reduced", "product"),
        Call("reduce_scatter_tensor", "parts", "product"),
        Call("reduce_scatter", "parts", "product"),
        Call("reduce", "reduced", "product"),
    ),
    "premultiplied": (
        Call("all_reduce", "reduced", "premul"),
        Call("reduce_scatter_tensor", "parts", "premul"),
        Call("reduce_scatter", "parts", "premul"),
        Call("reduce", "reduced", "premul"),
    ),
    "functional": (
        Call("functional_all_reduce", "reduced", "sum"),
        Call("functional_all_reduce", "reduced", "max"),
        Call("functional_all_gather_tensor", "gathered"),
        Call("functional_reduce_scatter_tensor", "parts", "sum"),
        Call("functional_reduce_scatter_tensor", "parts", "max"),
        Call("functional_all_reduce_coalesced", "reduced", "sum"),
        Call("functional_all_gather_into_tensor_coalesced", "gathered"),
        Call("functional_reduce_scatter_tensor_coalesced", "parts", "sum"),
        Call("functional_all_reduce_inplace", "reduced", "max"),
        Call("functional_all_gather_tensor_inplace", "gathered"),
        Call("functional_all_gather_inplace", "gathered"),
        Call("functional_reduce_scatter_tensor_inplace", "parts", "max"),
    ),
    "functional moves": (
        Call("functional_broadcast", "gathered"),
        Call("functional_all_to_all_single", "exchanged"),
        Call("functional_all_to_all_single_uneven", "uneven"),
        Call("functional_all_to_all_inplace", "uneven"),
        Call("functional_permute_tensor", "exchanged"),
        Call("functional_batch_p2p_ops_inplace", "exchanged"),
    ),
    "coalesced": (
        Call("coalesced_all_reduce", "reduced", "sum"),
        Call("coalesced_all_gather_into_tensor", "gathered"),
        Call("coalesced_reduce_scatter_tensor", "parts", "sum"),
    ),
}  # fmt: skip
"""Collectives of one kind, which run in one case.

If a backend refuses one of them, the others run once more without it.
"""

CALLS: dict[str, Call] = {call.name: call for calls in BUNDLES.values() for call in calls}
"""Every collective by the name of its answer."""

WAITS = ("at_once", "async", "together", "backwards")
MOST_TIMES = 10_000
MOST_STRIDE = 8
MOST_OFFSET = 7
ORDERS = ("rows", "transposed", "channels_last")
MEMORIES = ("new", "kept", "freed")
GROUP_FORMS = ("group", "mesh", "axis", "name")


@dataclass(frozen=True, kw_only=True, repr=False)
class CollectivesCase(Case):
    """Describes calls of some collectives. Each collective is called on every size.

    A size is a number of elements.

    A collective with a root is called once with each rank as the root.

    Attributes:
        collectives: Names of collectives, such as 'all_reduce_sum', in the order of the calls: keys of CALLS.
        numels: The sizes, all different.
        waits: How the subject waits for calls. If 'at_once', the calls are synchronous. If 'async', the subject waits
            for each call before it begins the next. If 'together', the subject begins all calls, then waits for the
            calls in the same order. If 'backwards', the subject begins all calls, then waits for the calls from the
            last to the first.
        times: Number of consecutive calls of each collective, on each size and from each root.
        stride: Distance in memory, in elements, from one element of an operand or a result to the next. If 1, tensors
            are contiguous. If the backend refuses other strides by an error, the call is made again with contiguous
            tensors.
        offset: Number of elements of memory between an address that is a multiple of 16 bytes and the first element of
            an operand or a result.
        order: Order of the elements of one size in memory. If 'rows', the elements lie one after the other. If
            'transposed', the elements are a matrix whose columns lie one after the other. If 'channels_last', the
            elements are (channels, height, width) in torch.channels_last. 'transposed' and 'channels_last' are dense
            but not contiguous, and the same on all ranks. Uneven splits always have 'rows', because they cut rows.
        memory: Memory of operands and results. If 'new', no call had this memory before. If 'kept', each call is made
            twice, first on other elements. Both calls have their operands and results in the same tensors. Only the
            second call's result is judged. If 'freed', each call is made twice too, but the second call has other
            tensors, at the addresses of the first call's tensors.
        group_form: How functional collectives are given the group: as a group, as a mesh, as a mesh and the number of
            its axis, or as a name. With the last two forms, all other collectives name ranks by their numbers in the
            world, and with the first two by their numbers in the group.
    """

    VALUE_MODES: ClassVar[tuple[str, ...]] = ("dense", "index", "special")

    collectives: tuple[str, ...] = ("all_reduce_sum",)
    numels: Annotated[tuple[int, ...], Within(0)] = (1,)
    waits: Annotated[str, OneOf(WAITS)] = "at_once"
    times: Annotated[int, Within(1, MOST_TIMES)] = 1
    stride: Annotated[int, Within(1, MOST_STRIDE)] = 1
    offset: Annotated[int, Within(0, MOST_OFFSET)] = 0
    order: Annotated[str, OneOf(ORDERS)] = "rows"
    memory: Annotated[str, OneOf(MEMORIES)] = "new"
    group_form: Annotated[str, OneOf(GROUP_FORMS)] = "group"

    def check_fields(self) -> None:
        unknown = [name for name in self.collectives if name not in CALLS]
        require(not unknown, f"collectives must be some of {', '.join(CALLS)}, got {', '.join(map(repr, unknown))}")
        for field in ("collectives", "numels"):
            values = getattr(self, field)
            require(
                0 < len(values) == len(set(values)),
                f"{field} must hold at least one value, none of them twice, got {values}",
            )
        require(
            self.stride == 1 or self.order == "rows", f"stride={self.stride} is only for order='rows': set order='rows'"
        )
        is_waited = self.waits in ("at_once", "async")
        require(
            self.memory == "new" or is_waited,
            f"memory={self.memory!r} needs waits='at_once' or 'async', got {self.waits!r}",
        )
        require(not self.records, "no collectives besides the judged ones are documented: set records=False")

    @property
    def calls(self) -> tuple[Call, ...]:
        return tuple(CALLS[name] for name in self.collectives)

    def without(self, refused: Collection[str]) -> CollectivesCase | None:
        names = {name.removeprefix(f"{self.dtype}:") for name in refused}
        left = tuple(call.name for call in self.calls if names.isdisjoint((call.name, call.function)))
        return replace(self, collectives=left) if left and left != self.collectives else None

    @property
    def width(self) -> int:
        """Returns the number of elements that a rank has of each kind of operand."""
        return self.world_size * sum(self.numels)

    @property
    def bounds(self) -> tuple[tuple[int, int], ...]:
        """Returns for each size the range [start, stop) of its elements within a rank's operand."""
        stops = [self.world_size * sum(self.numels[: index + 1]) for index in range(len(self.numels))]
        return tuple((stop - self.world_size * numel, stop) for stop, numel in zip(stops, self.numels, strict=True))

    @property
    def names_ranks_in_group(self) -> bool:
        return self.group_form in ("group", "mesh")

    def split(self, numel: int, source: int, target: int) -> int:
        """Returns how many elements `source` sends to `target` with uneven splits: all of `numel`, half or none."""
        return (numel, 0, -(-numel // 2))[(2 * source + target + numel) % 3]

    def describe_tensors(self) -> dict[str, CaseTensor]:
        """Describes each operand and answer. A tensor that differs between ranks has one row per rank."""
        ranks, numel, own = self.world_size, sum(self.numels), Layout((Shard(0),))
        results = {
            "reduced": CaseTensor((numel,), replicated(), "state"),
            "parts": CaseTensor((ranks, numel), own, "state"),
            "gathered": CaseTensor((ranks, numel), replicated(), "state"),
            "exchanged": CaseTensor((ranks, ranks, numel), own, "state"),
            "uneven": CaseTensor((ranks, ranks * numel), own, "state"),
        }
        given = {call.operand: CaseTensor((ranks, self.width), own) for call in self.calls}
        return given | {call.name: results[call.result] for call in self.calls}
