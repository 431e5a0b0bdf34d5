"""Lists the names of torch's operators that need no separate rule: see `equivtest.oracle.running`."""

from __future__ import annotations

MOVES = frozenset(
    {
        "_reshape_alias", "_unsafe_view", "alias", "as_strided", "clone", "contiguous", "detach", "diagonal",
        "embedding", "expand", "flip", "gather", "index", "index_select", "lift_fresh", "narrow", "permute", "repeat",
        "roll", "select", "select_backward", "slice", "slice_backward", "split", "split_with_sizes", "squeeze",
        "t", "transpose", "tril", "triu", "unbind", "unsqueeze", "upsample_nearest1d", "upsample_nearest2d",
        "upsample_nearest3d", "view",
    }
)  # fmt: skip
"""Operations that only move values, or put them between zeros."""

SUMS = frozenset({"cumsum", "index_add", "index_put", "_unsafe_index_put", "scatter_add"})
"""Operations that add elements at positions given by integers."""

PUTS = frozenset({"index_copy", "scatter", "select_scatter", "slice_scatter"})
"""Operations that replace some elements of a tensor by elements of another."""

MADE = frozenset(
    {
        "arange", "empty", "empty_like", "empty_strided", "eye", "full", "full_like", "new_empty", "new_empty_strided",
        "new_full", "new_ones", "new_zeros", "ones", "ones_like", "scalar_tensor", "zeros", "zeros_like",
    }
)  # fmt: skip
"""Operations whose result does not depend on the values of any tensor."""

UNKNOWN = frozenset({"equal", "_local_scalar_dense"})
"""Operations whose result is a Python number or bool, on which the module may decide."""

UNKNOWN_IN_FLOAT64 = frozenset({"hardsigmoid_backward"})
"""Operations whose float64 kernel uses a float32 constant, 1/6 (torch 2.13.0; finding 42)."""

WORDS = {"_local_scalar_dense": "item()"}
"""Operator -> name that users know."""

FACTORS = {"alpha", "beta"}
COMPARES = frozenset({"eq", "ne", "lt", "le", "gt", "ge"})
SETS = {"zero": 0.0, "fill": None, "copy": None}
"""In-place operations that write a value unchanged."""
