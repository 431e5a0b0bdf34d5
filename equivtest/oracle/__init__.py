"""What is right: unsharded references that know nothing of ranks, meshes or processes.

A package with a case class of its own registers what is expected of it:

    @expect.register
    def expect_mine(case: MyCase, index: int) -> Expected: ...
"""

from __future__ import annotations

import functools

from equivtest.cases.base import Case
from equivtest.cases.collective_calls import CollectivesCase
from equivtest.cases.cross_entropy import CrossEntropyCase, RefusedCrossEntropyCase
from equivtest.cases.data_parallel import DataParallelCase
from equivtest.cases.dropout import DropoutCase
from equivtest.cases.embedding import EmbeddingCase, RefusedEmbeddingCase
from equivtest.cases.embedding_ways import EmbeddingWaysCase
from equivtest.cases.engine import EngineCase
from equivtest.cases.fetch import FetchCase, RefusedFetchCase
from equivtest.cases.gathered_cross_entropy import GatheredCrossEntropyCase, RefusedGatheredCrossEntropyCase
from equivtest.cases.lifecycle import LifecycleCase
from equivtest.cases.linear import LinearCase, RefusedLinearCase
from equivtest.cases.mixed import MixedCase
from equivtest.cases.mlp import MlpCase
from equivtest.cases.module import ModuleCase
from equivtest.cases.norm import NormCase
from equivtest.cases.perceptron import PerceptronCase
from equivtest.cases.prepared import PreparedCase
from equivtest.cases.redistribute import RedistributeCase
from equivtest.cases.redistribute_refused import RefusedRedistributeCase
from equivtest.cases.reduction import ReductionCase
from equivtest.cases.sharding_refused import RefusedShardingCase
from equivtest.cases.two_axes import TwoAxisCase
from equivtest.errors import Misuse
from equivtest.oracle.collective_calls import expect_collectives
from equivtest.oracle.collectives import Collectives, document
from equivtest.oracle.cross_entropy import document_cross_entropy, expect_cross_entropy
from equivtest.oracle.data_parallel_collectives import document_data_parallel
from equivtest.oracle.dropout import document_dropout, expect_dropout, expect_dropout_held
from equivtest.oracle.embedding import expect_embedding
from equivtest.oracle.embedding_collectives import document_embedding
from equivtest.oracle.embedding_ways import document_both_ways, expect_both_ways, expect_each_way
from equivtest.oracle.engine import expect_engine
from equivtest.oracle.expected import Expected
from equivtest.oracle.fetch import expect_fetch
from equivtest.oracle.fsdp2_tp_collectives import document_fsdp2_tp
from equivtest.oracle.gathered_cross_entropy import document_gathered, expect_gathered
from equivtest.oracle.held import Held
from equivtest.oracle.hsdp_collectives import document_hsdp
from equivtest.oracle.lifecycle import expect_lifecycle
from equivtest.oracle.lifecycle_costs import document_lifecycle
from equivtest.oracle.linear import expect_linear
from equivtest.oracle.mixed import expect_mixed
from equivtest.oracle.mlp import expect_mlp
from equivtest.oracle.mlp_collectives import document_mlp
from equivtest.oracle.module import expect_module
from equivtest.oracle.norm_layer import document_norm, expect_norm
from equivtest.oracle.redistribution import document_prepared, document_redistribute, expect_redistribute
from equivtest.oracle.reduction import expect_reduction
from equivtest.oracle.reduction_collectives import document_reduction

__all__ = ["expect", "expect_held"]


@functools.singledispatch
def expect(case: Case, index: int) -> Expected:
    """What a correct subject answers for draw `index` of case.values; nothing if it must refuse.

    Raises:
        Misuse: nobody registered what is expected of this class.
        InexactData: the drawn values break the conditions under which equality can be asked for.
        IndexError: the case has no such draw.
    """
    raise Misuse(
        f"nothing is known to be expected of {type(case).__name__}: decorate the function that computes it with "
        "equivtest.oracle.expect.register, in the module that defines the class"
    )


@functools.singledispatch
def expect_held(case: Case, index: int, held: Held) -> Expected:
    """As `expect`, but where an answer follows from other answers: from what the ranks hold of those.

    A class registers this where roundings may add up: steps of training, one layer after another.

    Args:
        held: rank -> what it answered, by name.
    """
    return expect(case, index)


def expect_refusal(case: Case, index: int) -> Expected:
    """No tensor at all, for a case outside the contract."""
    return Expected({}, {})


def document_two_axes(case: TwoAxisCase, rank: int) -> Collectives:
    """Those of the case's style."""
    return document_hsdp(case, rank) if case.style == "hsdp" else document_fsdp2_tp(case, rank)


expect.register(LinearCase, expect_linear)
expect.register(PerceptronCase, expect_mlp)
expect_held.register(PerceptronCase, expect_mlp)
expect.register(MixedCase, expect_mixed)
expect_held.register(MixedCase, expect_mixed)
expect.register(EngineCase, expect_engine)
expect_held.register(EngineCase, expect_engine)
document.register(MlpCase, document_mlp)
document.register(DataParallelCase, document_data_parallel)
document.register(TwoAxisCase, document_two_axes)
expect.register(EmbeddingCase, expect_embedding)
document.register(EmbeddingCase, document_embedding)
expect.register(ModuleCase, expect_module)
expect.register(EmbeddingWaysCase, expect_each_way)
expect_held.register(EmbeddingWaysCase, expect_both_ways)
document.register(EmbeddingWaysCase, document_both_ways)
expect.register(CrossEntropyCase, expect_cross_entropy)
document.register(CrossEntropyCase, document_cross_entropy)
expect.register(GatheredCrossEntropyCase, expect_gathered)
document.register(GatheredCrossEntropyCase, document_gathered)
expect.register(RefusedGatheredCrossEntropyCase, expect_refusal)
expect.register(DropoutCase, expect_dropout)
expect_held.register(DropoutCase, expect_dropout_held)
document.register(DropoutCase, document_dropout)
expect.register(NormCase, expect_norm)
document.register(NormCase, document_norm)
expect.register(ReductionCase, expect_reduction)
document.register(ReductionCase, document_reduction)
expect.register(RedistributeCase, expect_redistribute)
document.register(RedistributeCase, document_redistribute)
document.register(PreparedCase, document_prepared)
expect.register(CollectivesCase, expect_collectives)
expect.register(FetchCase, expect_fetch)
expect.register(LifecycleCase, expect_lifecycle)
document.register(LifecycleCase, document_lifecycle)
expect.register(RefusedLinearCase, expect_refusal)
expect.register(RefusedFetchCase, expect_refusal)
expect.register(RefusedEmbeddingCase, expect_refusal)
expect.register(RefusedCrossEntropyCase, expect_refusal)
expect.register(RefusedRedistributeCase, expect_refusal)
expect.register(RefusedShardingCase, expect_refusal)
