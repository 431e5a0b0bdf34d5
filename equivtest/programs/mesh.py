"""Meshes of named axes. A batch may be divided along one of the axes."""

from __future__ import annotations

from dataclasses import dataclass

from equivtest.cases.case import Case, Shape, replicated
from equivtest.layout import Layout, Placement, Replicate, Shard, coordinate_of
from equivtest.programs.fields import World


@dataclass(frozen=True, kw_only=True, repr=False)
class MeshCase(Case):
    """A case on a mesh. The mesh has named axes, or one axis without a name. Its ranks lie in row-major order."""

    world: World = World()

    @property
    def axes(self) -> tuple[str, ...]:
        return self.world.axes

    @property
    def mesh_shape(self) -> Shape:
        return self.world.mesh or (self.world_size,)

    @property
    def num_parts(self) -> int:
        return self.mesh_shape[self.world.batch_place]

    @property
    def rows_layout(self) -> Layout:
        places = range(len(self.mesh_shape))
        return Layout(tuple(Shard(0) if place == self.world.batch_place else Replicate() for place in places))

    @property
    def mesh_of_part(self) -> Shape:
        """Shape of the mesh of the ranks that have the same rows. It has all axes except the batch's axis."""
        return self.mesh_shape[: self.world.batch_place] + self.mesh_shape[self.world.batch_place + 1 :]

    def stacked(self, layout: Layout) -> Layout:
        """Returns the layout of a tensor that stacks, along a new first dim, one tensor for each part of the batch.

        The ranks that have the rows of a part have that part's tensor, under `layout`, and no tensor of another part.
        """
        placements: list[Placement] = [
            Shard(each.dim + 1) if isinstance(each, Shard) else each for each in layout.placements
        ]
        return Layout((*placements[: self.world.batch_place], Shard(0), *placements[self.world.batch_place :]))

    @property
    def whole_layout(self) -> Layout:
        return replicated(len(self.mesh_shape))

    def ranks_of_part(self, part: int) -> tuple[int, ...]:
        coordinates = [coordinate_of(rank, self.mesh_shape) for rank in range(self.world_size)]
        return tuple(rank for rank, found in enumerate(coordinates) if found[self.world.batch_place] == part)


def mesh_along(num_ranks: int, axes: tuple[str, ...], axis: str) -> Shape:
    place = axes.index(axis) if axis else 0
    return tuple(num_ranks if number == place else 1 for number in range(len(axes)))


def meshes_of(world_size: int, num_axes: int) -> tuple[Shape, ...]:
    """Lists all mesh shapes of `world_size` ranks and `num_axes` axes, the shape with the longest first axis first."""
    if num_axes == 0:
        return ((),)
    if num_axes == 1:
        return ((world_size,),)
    sizes = [size for size in range(world_size, 0, -1) if world_size % size == 0]
    return tuple((size, *others) for size in sizes for others in meshes_of(world_size // size, num_axes - 1))
