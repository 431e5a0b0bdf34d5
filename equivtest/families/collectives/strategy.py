"""Draws cases of collectives."""

from __future__ import annotations

from equivtest.base import limits
from equivtest.cases.picks import Cases, Draw, free, itself, pick, pick_run
from equivtest.families.collectives.case import BUNDLES, CALLS, GROUP_FORMS, WAITS, CollectivesCase
from equivtest.property import Space

NUMELS = (1, 2, 3, 7, 8, 9, 31, 32, 33, 0, 1000, 1025)
"""Sizes. Larger ones occur only in the cases that always run, because such a case takes long."""
SLOW, LARGEST_OF_SLOW = "reduce_scatter", 3
"""Function that gloo makes from one reduction per rank, and its largest size on more than MANY_RANKS ranks.

On 64 ranks one call takes 22 s of processor time for 64 elements, 3 s for 8 and 1 s for 1 (torch 2.13.0).
"""
NUM_NUMELS = 5
DRAWN = {name: tuple(call.name for call in calls) for name, calls in BUNDLES.items() if name != "premultiplied"}
"""Bundle -> its collectives.

PREMUL_SUM, which torch documents only for NCCL, occurs only in the cases that always run.
"""

CALLED = (False, False, False, True)
"""Whether a case takes a bundle: one in four, so that random cases are small."""
TAKEN = (False, True, True, True)
OFFSETS = (0, 0, 0, 1, 3, 4)
LAYOUTS = (("rows", 1),) * 8 + (("rows", 2), ("rows", 3), ("transposed", 1), ("channels_last", 1))
"""(order, stride) of the operands: a stride needs order 'rows'."""
MEMORY_DRAWN = ("new",) * 8 + ("kept", "freed")
COLLECTIVE_MODES = (("dense",), ("index",), ("special",), *[("special", "dense", "index")] * 12)
"""Modes of the draws of one case.

Most cases have an odd number of draws, so that repeating draw 0 shows a defect in every other call.
"""


@Cases
def collectives_cases(draw: Draw, space: Space) -> CollectivesCase:
    """Draws cases with some collectives. Shrinks to one draw of dense values, and one call on one element."""
    world_size = pick(draw, "world_size", space.world_sizes)
    waits, (order, stride) = pick(draw, "waits", WAITS), pick(draw, "order and stride", LAYOUTS)
    memory = pick(draw, "memory", MEMORY_DRAWN)
    collectives = _pick_collectives(draw, stride)
    are_many = world_size > limits.MANY_RANKS
    numels = (_pick_one_numel(draw, collectives),) if are_many else _pick_numels(draw)
    run = pick_run(draw, world_size, COLLECTIVE_MODES, records=())
    if are_many:  # each collective with a root is called with as many roots
        run |= {"values": run["values"][:1], "repeats": False}
    return CollectivesCase(
        world_size=world_size,
        dtype=pick(draw, "dtype", space.dtypes),
        collectives=collectives,
        numels=numels,
        waits=waits,
        stride=stride,
        offset=pick(draw, "offset", OFFSETS),
        order=order,
        memory=memory if waits in ("at_once", "async") else "new",
        group_form=pick(draw, "group_form", GROUP_FORMS),
        **run,
    )


def _pick_collectives(draw: Draw, stride: int) -> tuple[str, ...]:
    """Draws names. If `stride` is above 1, all are from one bundle, because many backends refuse strides."""
    called: list[list[str]] = []
    for bundle, calls in DRAWN.items():
        if pick(draw, bundle, CALLED, itself if stride == 1 else free):
            called.append([name for name in calls if pick(draw, f"takes {name}", TAKEN, free)])
    return tuple(name for names in called[: None if stride == 1 else 1] for name in names) or ("all_reduce_sum",)


def _pick_numels(draw: Draw) -> tuple[int, ...]:
    numels = [pick(draw, f"size {index}", (None, *NUMELS), kind_of_numel) for index in range(NUM_NUMELS)]
    return tuple(dict.fromkeys(numel for numel in numels if numel is not None)) or (1,)


def _pick_one_numel(draw: Draw, collectives: tuple[str, ...]) -> int:
    is_slow = any(CALLS[name].function == SLOW for name in collectives)
    numels = [numel for numel in NUMELS if not is_slow or numel <= LARGEST_OF_SLOW]
    return pick(draw, "only size", numels, kind_of_numel)


def kind_of_numel(numel: int | None) -> str:
    """Returns the class of a size. A covering array has each class, not each size."""
    return "no call" if numel is None else "none" if numel == 0 else "few" if numel < 1000 else "many"
