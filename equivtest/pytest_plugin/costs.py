"""Says how long each property takes in a gate, to balance shards, workers and time budgets."""

from __future__ import annotations

import math

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
SECONDS_TO_BEGIN = {
    "every_optimizer": 18, "token_mean_step": 6, "data_parallel_block_of_outputs": 6, "replicated_pipelined_step": 5,
    "unsynchronized_step": 5, "joined_step": 5, "averaged_block": 5, "scaled_step": 5, "resumed_step": 4,
    "pipelined_step": 3, "attention_block": 3, "local_sgd_block": 3, "sharded_pipelined_step": 3,
    "flat_sharded_step": 2, "flat_sharded_step_by_largest": 2, "decoder": 2, "fully_sharded_block_by_layers": 2,
    "fully_sharded_block_with_casts": 2, "fully_sharded_block_by_calls": 2, "fully_sharded_block_by_switches": 2,
}  # fmt: skip
"""Program -> measured seconds of the search for shapes and dtypes in which it can be judged, from 2 s on."""
SECONDS_OF_CALLS = 66
"""Usual seconds of one search among those that enumerate calls."""
FIRST_WORLDS = (2, 4, 3)
"""World sizes in the order in which a run with a time budget takes them. Others come later, and one rank last."""
LATER_ROUND = 0.25
"""Time for a search, compared with a search on the world size before in that order."""


def cost_of(node_id: str) -> int:
    """Returns the seconds of a property, or of one search that enumerates calls."""
    return SECONDS_OF_CALLS if enumerates_calls(node_id) else SECONDS.get(_name_in(node_id), SECONDS_OF_OTHERS)


def enumerates_calls(node_id: str) -> bool:
    """True if the label at the end of the node id is that of a search which enumerates calls."""
    return CALLS in node_id.rpartition("[")[2]


def order_in_budget(node_id: str, world_size: int) -> tuple[int, ...]:
    """Returns a key that sorts searches so that those that show most in a short time come first."""
    return _round_of(world_size), SECONDS_TO_BEGIN.get(_name_in(node_id), 0), cost_of(node_id)


def weight_in_budget(node_id: str, world_size: int) -> float:
    """Returns a number in proportion to a search's share of a time budget.

    It grows with the root of the cost, because the first cases of a property show more than later cases.
    """
    return math.sqrt(cost_of(node_id)) * LATER_ROUND ** _round_of(world_size)


def _round_of(world_size: int) -> int:
    if world_size in FIRST_WORLDS:
        return FIRST_WORLDS.index(world_size)
    return len(FIRST_WORLDS) + (world_size == 1)


def _name_in(node_id: str) -> str:
    return node_id.rpartition("::")[2].partition("[")[0]
