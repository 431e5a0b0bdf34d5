"""Every defect: what it replaces, what must reject it, and the smallest case, derived by hand."""

from __future__ import annotations

from dataclasses import dataclass

from equivtest.cases.base import Case
from equivtest.cases.data_parallel import DataParallelCase
from equivtest.cases.embedding import EmbeddingCase
from equivtest.cases.fetch import FetchCase, RefusedFetchCase
from equivtest.cases.linear import LinearCase
from equivtest.cases.mlp import MlpCase
from equivtest.cases.norm import NormCase
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
_MEMORY = "equivtest.defects.zero3_memory:"
_LINEAR = "equivtest.defects.tensor_parallel:"
_MLP = "equivtest.defects.sequence_parallel:"
_DATA = "equivtest.defects.data_parallel:"
_ARITHMETIC = "equivtest.defects.linear_arithmetic:"
_EMBEDDING = "equivtest.defects.embedding:"
_NORM = "equivtest.defects.norm:"
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
        _MEMORY + "buffer_not_zeroed",
        "zero3_fetch_all_reduce",
        "uninitialised memory reaches a value",
        "equals_unsharded",
        "value",
        FetchCase(world_size=2),
        "one rank fills its whole buffer itself; of two, the second adds what it found in memory",
    ),
    Defect(
        _MEMORY + "taken_before_it_arrives",
        "zero3_fetch_all_gather",
        "a collective not waited for",
        "equals_unsharded",
        "value",
        FetchCase(world_size=2),
        "one rank waits for nobody; of two, the first looks before the second has come",
    ),
    Defect(
        _MEMORY + "buffer_kept_from_the_last_call",
        "zero3_fetch_all_reduce",
        "state across calls",
        "equals_unsharded",
        "value",
        FetchCase(world_size=2, values=(("dense", 0), ("dense", 1))),
        "one rank overwrites its whole buffer; of two, the second adds the sum of the call before",
    ),
    Defect(
        _MEMORY + "cached_by_numel",
        "zero3_fetch_all_gather",
        "a cache keyed too coarsely",
        "equals_unsharded",
        "value",
        FetchCase(world_size=1, parameters=((1,), (1,)), requires_grad=(True, True)),
        "two parameters of one element each share an entry, on one rank too",
    ),
    Defect(
        _MEMORY + "alternates",
        "zero3_fetch_all_reduce",
        "state across calls",
        "repeats_itself",
        "repeat",
        FetchCase(world_size=2, values=(("special", 0),), repeats=True),
        "one rank overwrites its whole buffer; of two, the second adds +0.0 or -0.0 to the first one's -0.0",
    ),
    Defect(
        _MEMORY + "rounds_through_bfloat16",
        "zero3_fetch_all_gather",
        "rounded on its way",
        "equals_unsharded",
        "value",
        FetchCase(world_size=1),
        "one number of 24 significand bits suffices",
    ),
    Defect(
        _MEMORY + "flushes_subnormals",
        "zero3_fetch_all_gather",
        "rounded on its way",
        "equals_unsharded",
        "value",
        FetchCase(world_size=1, values=(("special", 10),)),
        "one element suffices; the special value number 10 is the smallest subnormal",
    ),
    Defect(
        _MEMORY + "replaces_nan",
        "zero3_fetch_all_reduce",
        "special values replaced",
        "equals_unsharded",
        "value",
        FetchCase(world_size=1, values=(("special", 4),)),
        "one element suffices; the special value number 4 is the first NaN",
    ),
    Defect(
        _MEMORY + "loses_signs_of_zero",
        "zero3_fetch_all_gather",
        "special values replaced",
        "is_exact_without_reduction",
        "bits",
        FetchCase(world_size=1, values=(("special", 0),)),
        "one element suffices; the special value number 0 is -0.0",
    ),
    Defect(
        _MEMORY + "sums_the_negative",
        "zero3_fetch_all_reduce",
        "special values replaced",
        "is_exact_but_for_added_zeros",
        "bits",
        FetchCase(world_size=2, values=(("special", 1),)),
        "one rank adds nothing; of two, the second adds +0.0 to the -0.0 that number 1, +0.0, was turned into",
    ),
    Defect(
        _MEMORY + "adds_zero_on_one_rank",
        "zero3_fetch_all_reduce",
        "a way of its own for one rank",
        "is_the_identity_for_one_rank",
        "bits",
        FetchCase(world_size=1, values=(("special", 0),)),
        "one element suffices; more ranks go the common way",
    ),
    Defect(
        _MEMORY + "promotes_mixed_dtypes",
        "zero3_fetch_all_gather",
        "misfits accepted",
        "refuses",
        "not_refused",
        RefusedFetchCase(world_size=1, parameters=((1,), (1,)), requires_grad=(True, True)),
        "two dtypes need two parameters; one rank accepts them too",
    ),
    Defect(
        _MEMORY + "only_the_first_rank_refuses",
        "zero3_fetch_all_reduce",
        "ranks that diverge",
        "refuses",
        "not_refused",
        RefusedFetchCase(world_size=2, parameters=((1,), (1,)), requires_grad=(True, True)),
        "a second rank is needed to accept what the first refuses; two dtypes need two parameters",
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
        _LINEAR + "rounds_on_one_rank",
        "rowwise_linear",
        "a way of its own for one rank",
        "is_the_identity_for_one_rank",
        "bits",
        LinearCase(world_size=1, style="rowwise", requires_grad=()),
        "one product of two factors that share the 24 bits of float32 has more than the 8 of bfloat16",
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
        _MLP + "stale_parameters",
        "sequence_parallel_mlp",
        "state across steps",
        "trains_like_unsharded",
        "value",
        MlpCase(world_size=1, requires_grad=("in_proj.weight",), optimizer="sgd", steps=2),
        "one weight, updated once, tells from the second step on",
    ),
    Defect(
        _MLP + "momentum_not_carried",
        "sequence_parallel_mlp",
        "state across steps",
        "trains_like_unsharded",
        "value",
        MlpCase(world_size=1, requires_grad=("in_proj.weight",), optimizer="sgd", steps=2, momentum=0.5),
        "the first update needs no momentum, so that two are needed",
    ),
    Defect(
        _MLP + "bias_without_weight_decay",
        "sequence_parallel_mlp",
        "flags",
        "trains_like_unsharded",
        "value",
        MlpCase(
            world_size=1,
            biases=("out_proj",),
            requires_grad=("out_proj.bias",),
            optimizer="sgd",
            steps=2,
            weight_decay=0.25,
        ),
        "one rank, one feature and one decayed bias suffice; training takes two steps at least",
    ),
    Defect(
        _MLP + "activation_on_partial_sum",
        "sequence_parallel_mlp",
        "a partial value taken for the whole",
        "equals_unsharded",
        "value",
        MlpCase(world_size=1, leading=(2,), requires_grad=()),
        "of two tokens of opposite sign one is not activated, whatever the sign of out_proj's weight",
    ),
    Defect(
        _MLP + "bias_gradient_of_own_tokens",
        "sequence_parallel_mlp",
        "a reduction missing in the backward",
        "gradients_equal_unsharded",
        "value",
        MlpCase(
            world_size=2,
            biases=("out_proj",),
            x_is_dtensor=True,
            use_local_output=False,
            requires_grad=("out_proj.bias",),
        ),
        "the second rank holds no token, so that its share of the gradient is zero",
    ),
    Defect(
        _MLP + "output_shards_swapped",
        "sequence_parallel_mlp",
        "shard order",
        "equals_unsharded",
        "value",
        MlpCase(world_size=2, leading=(2,), use_local_output=False, requires_grad=()),
        "two ranks need one token each",
    ),
    Defect(
        _DATA + "gradients_summed",
        "ddp_mlp",
        "wrong divisor or wrong group",
        "gradients_equal_unsharded",
        "value",
        DataParallelCase(world_size=2, biases=("out_proj",), requires_grad=("out_proj.bias",)),
        "one rank's sum is its average; of two it is twice that, and the sum of two cotangents is not zero",
    ),
    Defect(
        _DATA + "gradients_of_the_last_micro_batch",
        "fsdp2_mlp",
        "state across calls",
        "gradients_equal_unsharded",
        "value",
        DataParallelCase(
            world_size=1, style="fsdp2", biases=("out_proj",), requires_grad=("out_proj.bias",), micro_batches=2
        ),
        "two micro-batches are needed, one rank suffices; no cotangent is zero",
    ),
    Defect(
        _DATA + "frozen_parameter_decayed",
        "zero3_mlp_all_reduce",
        "flags",
        "trains_like_unsharded",
        "value",
        DataParallelCase(
            world_size=1,
            style="zero3",
            requires_grad=("out_proj.weight",),
            optimizer="sgd",
            steps=2,
            weight_decay=0.25,
        ),
        "one frozen weight of one element; training takes two steps at least",
    ),
    Defect(
        _DATA + "norm_reads_padding",
        "zero3_mlp_all_reduce",
        "uninitialised memory reaches a value",
        "trains_like_unsharded",
        "value",
        DataParallelCase(world_size=2, style="zero3", requires_grad=("out_proj.weight",), optimizer="sgd", steps=2),
        "one rank pads nothing; of two, the second holds nothing but padding of one element",
    ),
    Defect(
        _DATA + "whole_kept_over_the_update",
        "zero3_mlp_all_gather",
        "state across steps",
        "trains_like_unsharded",
        "value",
        DataParallelCase(world_size=1, style="zero3", requires_grad=("out_proj.weight",), optimizer="sgd", steps=2),
        "one weight, updated once, tells from the second step on",
    ),
    Defect(
        _DATA + "rank_without_partition_left_out",
        "zero3_mlp_all_gather",
        "size not a multiple of the world size",
        "gradients_equal_unsharded",
        "value",
        DataParallelCase(world_size=2, style="zero3", requires_grad=("out_proj.weight",)),
        "of two ranks the second holds nothing of one element, and has a row of its own",
    ),
    Defect(
        _ARITHMETIC + "partial_outputs_reduced_in_bfloat16",
        "rowwise_linear",
        "a reduction in fewer bits",
        "equals_unsharded",
        "value",
        LinearCase(world_size=2, style="rowwise"),
        "one rank reduces nothing; one product of odd integers takes 24 bits, bfloat16 has 8",
    ),
    Defect(
        _ARITHMETIC + "input_gradient_averaged",
        "colwise_linear",
        "wrong divisor or wrong group",
        "gradients_equal_unsharded",
        "value",
        LinearCase(world_size=2, style="colwise", requires_grad=("x",)),
        "the average of one rank is its sum; of two it is half",
    ),
    Defect(
        _ARITHMETIC + "one_product_dropped",
        "colwise_linear",
        "a term missing",
        "equals_unsharded",
        "value",
        LinearCase(world_size=1, style="colwise", in_features=2, requires_grad=()),
        "a product is only dropped where another is left; no product of dense values is zero",
    ),
    Defect(
        _ARITHMETIC + "weight_truncated_to_tf32",
        "colwise_linear",
        "operands in fewer bits",
        "equals_unsharded",
        "value",
        LinearCase(world_size=1, style="colwise", requires_grad=()),
        "the only weight of a dense draw is an odd integer of 12 bits, and TF32 has 11",
    ),
    Defect(
        _ARITHMETIC + "weight_gradient_one_ulp_off",
        "rowwise_linear",
        "one element off by one ulp",
        "gradients_equal_unsharded",
        "value",
        LinearCase(world_size=1, style="rowwise", requires_grad=("weight",)),
        "one element on one rank is off",
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
    Defect(
        _EMBEDDING + "mask_off_by_one",
        "rowwise_embedding",
        "ids at the edge of a shard",
        "equals_unsharded",
        "value",
        EmbeddingCase(world_size=2, style="rowwise", leading=(2,), num_embeddings=2, requires_grad=()),
        "one rank has no second part; of two ids in two tokens one begins it",
    ),
    Defect(
        _EMBEDDING + "mask_not_applied",
        "rowwise_embedding",
        "a partial value taken for the whole",
        "equals_unsharded",
        "value",
        EmbeddingCase(world_size=2, style="rowwise", num_embeddings=2, requires_grad=()),
        "one rank masks nothing, and a rank without ids of its own has no row to add",
    ),
    Defect(
        _EMBEDDING + "part_of_another_rank",
        "rowwise_embedding",
        "shard order",
        "equals_unsharded",
        "value",
        EmbeddingCase(world_size=2, style="rowwise", num_embeddings=2, requires_grad=()),
        "two ranks need one id each",
    ),
    Defect(
        _EMBEDDING + "lookups_averaged",
        "rowwise_embedding",
        "wrong divisor or wrong group",
        "equals_unsharded",
        "value",
        EmbeddingCase(world_size=2, style="rowwise", requires_grad=()),
        "one rank's lookup is its average; the zero of a rank without ids halves the other's",
    ),
    Defect(
        _EMBEDDING + "padding_row_learns",
        "colwise_embedding",
        "flags",
        "gradients_equal_unsharded",
        "value",
        EmbeddingCase(world_size=1, style="colwise", padding_idx=0),
        "one rank and one token, which holds the padding id, suffice",
    ),
    Defect(
        _EMBEDDING + "repeats_counted_once",
        "colwise_embedding",
        "a term missing",
        "gradients_equal_unsharded",
        "value",
        EmbeddingCase(world_size=1, style="colwise", leading=(2,)),
        "two tokens hold the only id",
    ),
    Defect(
        _EMBEDDING + "features_of_next_rank",
        "colwise_embedding",
        "shard order",
        "equals_unsharded",
        "value",
        EmbeddingCase(world_size=2, style="colwise", embedding_dim=2, requires_grad=()),
        "two ranks need one feature each",
    ),
    Defect(
        _EMBEDDING + "ids_gathered_in_another_order",
        "colwise_embedding",
        "shard order",
        "equals_unsharded",
        "value",
        EmbeddingCase(
            world_size=2, style="colwise", leading=(2,), num_embeddings=2, input_layout="shard(0)", requires_grad=()
        ),
        "two ranks need one token each; two tokens hold both of two ids",
    ),
    Defect(
        _NORM + "gradient_of_own_tokens",
        "sequence_layer_norm",
        "a reduction missing in the backward",
        "gradients_equal_unsharded",
        "value",
        NormCase(
            world_size=2,
            norm="layer_norm",
            leading=(2,),
            parameters=("weight", "bias"),
            requires_grad=("bias",),
        ),
        "two ranks need one token each, since torch gathers a shorter sequence",
    ),
    Defect(
        _NORM + "eps_outside_the_root",
        "sequence_rms_norm",
        "eps at another place",
        "equals_unsharded",
        "value",
        NormCase(world_size=1, norm="rms_norm", requires_grad=(), values=(("real", 1),)),
        "of mean square q, values are off by eps / sqrt(q) of themselves, by right by eps / 2 q: the same at a quarter",
    ),
    Defect(
        _NORM + "moments_of_a_feature",
        "sequence_rms_norm",
        "another dim",
        "equals_unsharded",
        "value",
        NormCase(world_size=1, norm="rms_norm", requires_grad=()),
        "of a single token each feature would become a sign",
    ),
)
"""Those of the older families; `equivtest.defects` adds the others."""
