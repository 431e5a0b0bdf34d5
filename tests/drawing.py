"""Cases drawn outside of a property, from a fixed seed."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import HealthCheck, Phase, find, given, seed, settings
from hypothesis.strategies import SearchStrategy

from equivtest import limits
from equivtest.families.collectives.strategy import collectives_cases
from equivtest.families.cross_entropy.strategy import (
    cross_entropy_cases,
    gathered_cross_entropy_cases,
    refused_cross_entropy_cases,
    refused_gathered_cross_entropy_cases,
)
from equivtest.families.dropout.strategy import dropout_cases
from equivtest.families.embedding.strategy import embedding_cases, embedding_ways_cases, refused_embedding_cases
from equivtest.families.linear.strategy import linear_cases, refused_linear_cases
from equivtest.families.norm.strategy import norm_cases
from equivtest.families.operators.strategy import operator_cases
from equivtest.families.redistribute.prepared.strategy import prepared_cases
from equivtest.families.redistribute.strategy import redistribute_cases, refused_redistribute_cases
from equivtest.families.reduction.strategy import reduction_cases
from equivtest.families.training.data_parallel.strategy import data_parallel_cases, refused_sharding_cases
from equivtest.families.training.strategy import mlp_cases, training_cases
from equivtest.families.training.two_axes.strategy import two_axis_cases
from equivtest.families.zero3.fetch.strategy import fetch_cases, refused_fetch_cases
from equivtest.families.zero3.lifecycle.strategy import lifecycle_cases
from equivtest.kit.case import C, Case
from equivtest.module import module_property
from equivtest.property import Space

SPACE = Space(limits.WORLD_SIZES, limits.DTYPES)

STRATEGIES: dict[str, Callable[[Space], SearchStrategy[Case]]] = {
    "colwise": lambda space: linear_cases(space, style="colwise"),
    "rowwise": lambda space: linear_cases(space, style="rowwise"),
    "collectives": collectives_cases,
    "fetch": fetch_cases,
    "lifecycle": lambda space: lifecycle_cases(space, collective="all_gather"),
    "mlp": mlp_cases,
    "training": training_cases,
    "ddp": lambda space: data_parallel_cases(space, style="ddp"),
    "fsdp2": lambda space: data_parallel_cases(space, style="fsdp2"),
    "zero3": lambda space: data_parallel_cases(space, style="zero3", fetch="all_gather"),
    "fsdp2_tp": lambda space: two_axis_cases(space, style="fsdp2_tp"),
    "hsdp": lambda space: two_axis_cases(space, style="hsdp"),
    "colwise embedding": lambda space: embedding_cases(space, style="colwise"),
    "rowwise embedding": lambda space: embedding_cases(space, style="rowwise"),
    "operators": operator_cases,
    "module": lambda space: module_property("torch.nn:Identity", "mine:whole", ((1,), (2, 3))).cases(space),
    "divided module": lambda space: module_property(
        "torch.nn:Identity", "mine:whole", ((1,), (64,), (64, 2)), batch="mean of parts"
    ).cases(space),
    "embedding ways": embedding_ways_cases,
    "layer_norm": lambda space: norm_cases(space, norm="layer_norm"),
    "rms_norm": lambda space: norm_cases(space, norm="rms_norm"),
    "cross entropy": cross_entropy_cases,
    "dropout": dropout_cases,
    "gathered cross entropy": gathered_cross_entropy_cases,
    "refused gathered cross entropy": refused_gathered_cross_entropy_cases,
    "reduction": reduction_cases,
    "prepared": prepared_cases,
    "redistribute": redistribute_cases,
    "refused colwise embedding": lambda space: refused_embedding_cases(space, style="colwise"),
    "refused rowwise embedding": lambda space: refused_embedding_cases(space, style="rowwise"),
    "refused cross entropy": refused_cross_entropy_cases,
    "refused colwise": lambda space: refused_linear_cases(space, style="colwise"),
    "refused rowwise": lambda space: refused_linear_cases(space, style="rowwise"),
    "refused fetch": refused_fetch_cases,
    "refused redistribute": refused_redistribute_cases,
    "refused sharding": refused_sharding_cases,
}
"""Every strategy of the package, by what it draws."""


def drawn(strategy: SearchStrategy[C], num: int, *, number: int = 0) -> list[C]:
    """`num` cases from the seed `number`."""
    cases: list[C] = []

    @seed(number)
    @settings(
        max_examples=num,
        phases=[Phase.generate],
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def keep(case: C) -> None:
        cases.append(case)

    keep()
    return cases


def smallest(strategy: SearchStrategy[C], condition: Callable[[C], bool] = lambda _: True) -> C:
    """What the strategy shrinks to where `condition` holds.

    Hypothesis is not asked to explain it, which traces a hundred further draws line by line.
    """
    phases = [Phase.generate, Phase.shrink]
    return find(strategy, condition, settings=settings(max_examples=2000, database=None, deadline=None, phases=phases))
