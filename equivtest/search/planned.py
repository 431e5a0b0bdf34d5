"""Plans the searches of a property in a run, from the run's profile and world sizes."""

from __future__ import annotations

from collections.abc import Collection

from equivtest.base.profiles import PROFILES, Part, Profile, plan, plan_enumeration
from equivtest.cases.case import Case
from equivtest.cases.picks import builder_of
from equivtest.property import Property


def profile_for(prop: Property, profile: Profile, subjects: Collection[object] = ()) -> Profile:
    """Returns the profile whose cases a run of `profile` has for the property.

    A conformance run has the gate's cases of an incomplete property, unless --subjects names the property.
    """
    return PROFILES["gate"] if prop.incomplete and profile.requires_cells and not subjects else profile


def parts_of(
    prop: Property, profile: Profile, world_sizes: tuple[int, ...], pinned: tuple[int, ...] = ()
) -> tuple[Part, ...]:
    """Returns the plan of each search of a property.

    Args:
        world_sizes: The run's world sizes on which the subject runs.
        pinned: Larger world sizes, which the run has only because examples of the property need them.
    """
    has_tables = builder_of(prop.cases) is not None
    parts = plan(profile, world_sizes, prop.weight, has_tables=has_tables) + plan(profile, pinned)
    if prop.enumeration is None:
        return parts
    searches = {size: num for size, num in prop.enumeration.parts.items() if size in world_sizes}
    return parts + plan_enumeration(profile, searches)


def pinned_sizes(
    prop: Property, profile: Profile, world_sizes: tuple[int, ...], *, is_limited: bool = False
) -> tuple[int, ...]:
    """Returns the world sizes of the property's examples that are larger than every world size of the profile.

    The result is () in a profile that is a first look, or with --world-sizes.

    Args:
        is_limited: True if devices or slots limit the number of ranks. Then the result is ().
    """
    if is_limited or world_sizes != profile.world_sizes or profile.several < 2:
        return ()
    return tuple(sorted({case.world_size for case in prop.examples if case.world_size > max(world_sizes)}))


def has_case(world_sizes: tuple[int, ...], dtypes: tuple[str, ...], case: Case, *, is_limited: bool) -> bool:
    """True if a run has the ranks, the processes and the dtypes that the case needs.

    Args:
        is_limited: True if devices or slots limit the number of processes.
    """
    has_room = not is_limited or case.num_processes <= max(world_sizes)
    return has_room and case.world_size in world_sizes and case.is_within(dtypes)
