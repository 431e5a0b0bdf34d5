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

from equivtest.cases.strategies.collective_calls import collectives_cases
from equivtest.cases.strategies.cross_entropy import (
    cross_entropy_cases,
    gathered_cross_entropy_cases,
    refused_cross_entropy_cases,
    refused_gathered_cross_entropy_cases,
)
from equivtest.cases.strategies.data_parallel import data_parallel_cases, refused_sharding_cases
from equivtest.cases.strategies.dropout import dropout_cases
from equivtest.cases.strategies.embedding import embedding_cases, embedding_ways_cases, refused_embedding_cases
from equivtest.cases.strategies.engine import engine_cases, whole_engine_cases
from equivtest.cases.strategies.fetch import fetch_cases, refused_fetch_cases
from equivtest.cases.strategies.lifecycle import lifecycle_cases
from equivtest.cases.strategies.linear import linear_cases, refused_linear_cases
from equivtest.cases.strategies.mixed import mixed_cases
from equivtest.cases.strategies.module import module_cases
from equivtest.cases.strategies.norm import norm_cases
from equivtest.cases.strategies.perceptron import mlp_cases, training_cases
from equivtest.cases.strategies.picks import edge_sizes
from equivtest.cases.strategies.prepared import prepared_cases
from equivtest.cases.strategies.redistribute import redistribute_cases, refused_redistribute_cases
from equivtest.cases.strategies.reduction import reduction_cases
from equivtest.cases.strategies.two_axes import two_axis_cases

__all__ = [
    "collectives_cases",
    "cross_entropy_cases",
    "data_parallel_cases",
    "dropout_cases",
    "edge_sizes",
    "embedding_cases",
    "embedding_ways_cases",
    "engine_cases",
    "fetch_cases",
    "gathered_cross_entropy_cases",
    "lifecycle_cases",
    "linear_cases",
    "mixed_cases",
    "mlp_cases",
    "module_cases",
    "norm_cases",
    "prepared_cases",
    "redistribute_cases",
    "reduction_cases",
    "refused_cross_entropy_cases",
    "refused_embedding_cases",
    "refused_fetch_cases",
    "refused_gathered_cross_entropy_cases",
    "refused_linear_cases",
    "refused_redistribute_cases",
    "refused_sharding_cases",
    "training_cases",
    "two_axis_cases",
    "whole_engine_cases",
]
