"""Predicates on data-parallel cases, for the conditions `where` in known_failures.toml."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from equivtest.families.training.data_parallel.case import DataParallelCase


def is_folded_by_a_view_alone(case: DataParallelCase) -> bool:
    """True if in_proj runs one kernel on a view of x in the forward, and another kernel on x in the recomputation.

    fully_shard makes the view, except in the recomputation of in_proj alone. Tied layers are one group of fully_shard,
    so that it makes no view in the recomputation of in_proj and the activation either. The kernels differ if x is not
    contiguous, if all its dims before tokens and features have size 1, and if x needs a gradient but the weight does
    not. Then the outer strides of the view fit the inner strides of the view, but the outer strides of x do not fit the
    inner strides of x (should_fold in aten/src/ATen/native/LinearAlgebra.cpp, torch 2.13.0).
    """
    *outer, tokens = case.leading
    is_computed_again = case.checkpointed == "in_proj" or (case.checkpointed == "hidden" and bool(case.tied))
    is_one_row = bool(outer) and set(outer) == {1} and tokens > 1 and case.in_features > 1
    needs = case.requires_grad
    return is_computed_again and is_one_row and not case.x_contiguous and "x" in needs and "in_proj.weight" not in needs


def has_empty_trained_shard(case: DataParallelCase) -> bool:
    return case.worst_shard_kind(f"param.{name}" for name in case.trained_names()) == "empty"


def smallest_numel(case: DataParallelCase) -> int:
    return min(math.prod(case.tensors[name].shape) for name in case.parameter_names())
