"""Computes layouts of partial tensors.  The harness passes the operands of such a tensor as one stacked tensor."""

from __future__ import annotations

from equivtest.layout import Layout, Partial, Replicate, Shard


def partial_axes(layout: Layout) -> tuple[int, ...]:
    """Returns the mesh axes along which each rank has an operand, and no rank has the reduced tensor."""
    return tuple(axis for axis, placement in enumerate(layout.placements) if isinstance(placement, Partial))


def without_partial(layout: Layout) -> Layout:
    return Layout(tuple(Replicate() if isinstance(each, Partial) else each for each in layout.placements))


def stacked(layout: Layout) -> Layout:
    """Returns the layout of the tensor that stacks all ranks' operands of a reduction.

    For each partial axis the stacked tensor has a leading dim of the axis's size, and this dim is sharded along the
    axis.  Example: the reduced tensor has the shape `shape` and is partial along one axis of 4 ranks.  Then the stacked
    shape is (4, *shape).  All other axes divide the dims of `shape` as before.
    """
    axes = partial_axes(layout)
    return Layout(
        tuple(
            Shard(axes.index(axis))
            if axis in axes
            else Shard(len(axes) + each.dim)
            if isinstance(each, Shard)
            else each
            for axis, each in enumerate(layout.placements)
        )
    )
