"""Says how long each property takes in a gate, to balance shards, workers and time budgets."""

from __future__ import annotations

from equivtest.base.profiles import CALLS

SECONDS = {
    "dtensor_operators": 720, "every_optimizer": 96, "collectives": 94, "sharded_pipelined_step": 71,
    "pipelined_step": 69, "token_mean_step": 67, "fsdp2_tp_mlp": 64, "fully_sharded_block_on_named_axes": 63,
    "averaged_block": 51, "fsdp2_mlp": 45, "replicated_pipelined_step": 42,
    "fully_sharded_sequence_parallel_block": 42, "unsynchronized_step": 41, "local_sgd_block": 41, "hsdp_mlp": 39,
    "scaled_step": 39, "zero_redundancy": 39, "norm_of_groups_by_root": 38, "fsdp2_mixed_mlp": 37, "ddp_tp_mlp": 37,
    "resumed_step": 37, "dtensor_operator_chains": 36, "joined_step": 36, "norm_of_one_mesh_by_sum": 31, "decoder": 31,
    "flat_sharded_block": 30, "fully_sharded_sequence_parallel_block_from_state": 28, "flat_sharded_step": 28,
    "norm_of_one_mesh_by_largest": 27, "flat_sharded_step_by_largest": 27, "sequence_parallel_mlp_trains": 27,
    "dtensor_cross_entropy": 25, "redistribute": 24, "zero3_mlp_all_reduce": 23, "zero3_mlp_all_gather": 21,
    "sequence_parallel_mlp": 21, "blocks_along_each_axis": 20, "checkpoint": 19, "sequence_rms_norm": 18,
    "ddp_mlp": 17, "colwise_linear": 16, "rowwise_linear": 14, "data_parallel_block_of_outputs": 14,
    "sequence_parallel_block": 14, "parallel_cross_entropy": 13, "gated_block": 12, "data_parallel_block_by_hook": 12,
    "fully_sharded_block_by_calls": 12, "attention_block": 11, "sequence_layer_norm": 11,
    "fully_sharded_block_by_layers": 11, "data_parallel_block_by_own_copies": 11, "rows_by_local_functions": 10,
    "differentiable_collectives": 10, "composable_data_parallel_block": 9, "fully_sharded_block_by_switches": 8,
    "fully_sharded_blocks_in_one_context": 8, "fully_sharded_block_with_casts": 8,
}  # fmt: skip
"""Property -> measured seconds of its items in a gate on two cores.  Only the relations of these numbers matter."""
SECONDS_OF_OTHERS = 7
SECONDS_OF_CALLS = 66
"""Usual seconds of one search among those that enumerate calls."""


def cost_of(node_id: str) -> int:
    """Returns the seconds of a property, or of one search that enumerates calls."""
    return SECONDS_OF_CALLS if CALLS in node_id else SECONDS.get(node_id.rpartition("::")[2], SECONDS_OF_OTHERS)
