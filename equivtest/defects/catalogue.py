"""Every defect: what it replaces, what must reject it, and the smallest case, derived by hand."""

from __future__ import annotations

from dataclasses import dataclass

from equivtest.cases.base import Case
from equivtest.cases.fetch import FetchCase
from equivtest.cases.linear import LinearCase
from equivtest.verdicts.verdict import Kind


@dataclass(frozen=True)
class Defect:
    """A subject that is wrong in one way.

    Attributes:
        subject: 'package.module:function'.
        replaces: The subject under whose property it must be rejected.
        family: The kind of real bug it stands for.
        claim, kind: What rejects it.
        smallest: The smallest case that shows it, and `why` no smaller one can.
    """

    subject: str
    replaces: str
    family: str
    claim: str
    kind: Kind
    smallest: Case
    why: str

    @property
    def name(self) -> str:
        """The function's name."""
        return self.subject.partition(":")[2]


_FETCH = "equivtest.defects.zero3_fetch:"
_LINEAR = "equivtest.defects.tensor_parallel:"
_COLLECTIVES = "equivtest.defects.collectives:"

DEFECTS = (
    Defect(
        _FETCH + "stride_by_unpadded_size",
        "zero3_fetch_all_reduce",
        "size not a multiple of the world size",
        "equals_unsharded",
        "value",
        FetchCase(world_size=2, parameters=((1,), (1,)), requires_grad=(True, True)),
        "one rank pads nothing, and only a parameter behind a padded one is displaced",
    ),
    Defect(
        _FETCH + "overlapping_padding",
        "zero3_fetch_all_reduce",
        "uninitialised memory reaches a value",
        "equals_unsharded",
        "value",
        FetchCase(world_size=2, parameters=((1,), (1,)), requires_grad=(True, True)),
        "one rank pads nothing, and only a parameter behind a padded one meets its padding",
    ),
    Defect(
        _FETCH + "first_partitions_swapped",
        "zero3_fetch_all_gather",
        "shard order",
        "equals_unsharded",
        "value",
        FetchCase(world_size=2, parameters=((2,),)),
        "two ranks need one element each",
    ),
    Defect(
        _FETCH + "raises_where_all_is_padding",
        "zero3_fetch_all_gather",
        "ranks that diverge",
        "equals_unsharded",
        "raised",
        FetchCase(world_size=2, parameters=((1,),)),
        "one element leaves the second of two ranks without one",
    ),
    Defect(
        _FETCH + "loses_requires_grad",
        "zero3_fetch_all_reduce",
        "flags",
        "does_not_touch_its_inputs",
        "touched",
        FetchCase(world_size=1, parameters=((1,),)),
        "one rank and one parameter that needs a gradient suffice",
    ),
    Defect(
        _LINEAR + "bias_on_every_rank",
        "rowwise_linear",
        "a partial value taken for the whole",
        "equals_unsharded",
        "value",
        LinearCase(world_size=2, style="rowwise", bias=True),
        "one rank adds it once; two add it twice",
    ),
    Defect(
        _LINEAR + "input_gradient_not_reduced",
        "colwise_linear",
        "a reduction missing in the backward",
        "gradients_equal_unsharded",
        "value",
        LinearCase(world_size=2, style="colwise", requires_grad=("x",)),
        "the second rank holds no out feature, so its share of the gradient is zero",
    ),
    Defect(
        _LINEAR + "weight_gradient_shards_swapped",
        "colwise_linear",
        "shard order",
        "gradients_equal_unsharded",
        "value",
        LinearCase(world_size=2, style="colwise", out_features=2, requires_grad=("weight",)),
        "two ranks need one out feature each",
    ),
    Defect(
        _LINEAR + "weight_gradient_replicated",
        "rowwise_linear",
        "layout of gradients",
        "keeps_layout_of_parameter",
        "layout",
        LinearCase(world_size=1, style="rowwise", requires_grad=("weight",)),
        "the layout is wrong on a mesh of one rank too",
    ),
    Defect(
        _LINEAR + "cotangent_scaled_in_place",
        "rowwise_linear",
        "inputs modified",
        "does_not_touch_its_inputs",
        "touched",
        LinearCase(world_size=1, style="rowwise", requires_grad=()),
        "one rank and one element suffice",
    ),
    Defect(
        _LINEAR + "output_differs_on_last_rank",
        "rowwise_linear",
        "replicas that differ",
        "agrees_on_all_ranks",
        "replica",
        LinearCase(world_size=2, style="rowwise"),
        "two ranks are needed to differ",
    ),
    Defect(
        _COLLECTIVES + "global_rank_for_mesh_rank",
        "zero3_fetch_all_gather",
        "wrong divisor or wrong group",
        "equals_unsharded",
        "value",
        FetchCase(world_size=1, parameters=((1,),), members=(1,)),
        "rank 0 of a mesh must be another process than 0, which takes a second process, not a second rank",
    ),
    Defect(
        _COLLECTIVES + "world_group_for_mesh_group",
        "zero3_fetch_all_reduce",
        "wrong divisor or wrong group",
        "equals_unsharded",
        "value",
        FetchCase(world_size=1, parameters=((1,),), members=(1,)),
        "two meshes of one rank each add up what is the other's",
    ),
    Defect(
        _COLLECTIVES + "parameters_averaged",
        "zero3_fetch_all_reduce",
        "wrong divisor or wrong group",
        "equals_unsharded",
        "value",
        FetchCase(world_size=2, parameters=((1,),)),
        "one rank's sum is its average",
    ),
    Defect(
        _COLLECTIVES + "barrier_after_fetch",
        "zero3_fetch_all_gather",
        "other collectives than documented",
        "uses_only_collectives",
        "collectives",
        FetchCase(world_size=1, parameters=((1,),), collective="all_gather", records=True),
        "one rank calls the barrier too",
    ),
    Defect(
        _COLLECTIVES + "one_collective_per_parameter",
        "zero3_fetch_all_gather",
        "other collectives than documented",
        "uses_only_collectives",
        "collectives",
        FetchCase(
            world_size=1, parameters=((1,), (1,)), requires_grad=(True, True), collective="all_gather", records=True
        ),
        "one parameter takes one collective; two of them two, on one rank too",
    ),
    Defect(
        _COLLECTIVES + "output_reduced_whole",
        "rowwise_linear",
        "other collectives than documented",
        "uses_only_collectives",
        "collectives",
        LinearCase(
            world_size=2, style="rowwise", in_features=2, output_layout="shard(0)", requires_grad=(), records=True
        ),
        "one rank reduces nothing, and torch reduces nothing where there are fewer in features than ranks",
    ),
)
"""All defects; the audit in tests/test_defects.py runs each one."""
