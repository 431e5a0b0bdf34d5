"""Cases of separate calls of collectives."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

from equivtest.cases.picks import pick, pick_run
from equivtest.families.collectives.case import BUNDLES, WAITS, CollectivesCase
from equivtest.property import Space

NUMELS = (1, 2, 3, 7, 8, 9, 31, 32, 33, 0, 1000, 1025)
LARGE_NUMELS = (2**17 + 1, 2**20)
MOST_DRAWN = 2**22
"""Elements of a kind of operand on all ranks together; a size that needs more is not drawn."""
NUM_NUMELS = 5
LARGE = (None,) * 38 + (0, 1)
"""Indices of large sizes, modulo their number; one case in twenty has one."""
NUM_BUNDLES = 5
DRAWN = tuple(bundle for name, bundle in BUNDLES.items() if name != "premultiplied")
"""PREMUL_SUM, which torch documents for NCCL alone, has only the cases that always run."""

MOST_IN_A_BUNDLE = max(map(len, DRAWN))
OFFSETS = (0, 0, 0, 1, 3, 4)
LAYOUTS = (("rows", 1),) * 8 + (("transposed", 1), ("channels_last", 1), ("rows", 2), ("rows", 3))
"""Orders and strides, which exclude each other."""
MEMORY_DRAWN = ("new",) * 8 + ("kept", "freed")
TAKEN = (False, True, True, True)
COLLECTIVE_MODES = (("dense",), ("index",), ("special",), *[("special", "dense", "index")] * 12)
"""An odd number of draws: draw 0 comes again in another call, which shows an alternation between calls."""


@st.composite
def collectives_cases(draw: DrawFn, space: Space) -> CollectivesCase:
    """Cases of some collectives of up to five bundles, on up to six sizes.

    Shrinks to one draw of dense values, and one call on one element.
    """
    world_size = pick(draw, "world_size", space.world_sizes)
    waits, (order, stride) = pick(draw, "waits", WAITS), pick(draw, "order and stride", LAYOUTS)
    memory = pick(draw, "memory", MEMORY_DRAWN)
    return CollectivesCase(
        world_size=world_size,
        dtype=pick(draw, "dtype", space.dtypes),
        collectives=_pick_collectives(draw),
        numels=_pick_numels(draw, world_size),
        waits=waits,
        stride=stride,
        offset=pick(draw, "offset", OFFSETS),
        order=order,
        memory=memory if waits in ("at_once", "async") else "new",
        **pick_run(draw, world_size, COLLECTIVE_MODES, records=()),
    )


def _pick_collectives(draw: DrawFn) -> tuple[str, ...]:
    """The collectives of some bundles; separate draws include or omit each bundle and each of its collectives.

    Shrinking can then omit any of them except the one that fails.
    """
    names: list[str] = []
    for number in range(NUM_BUNDLES):
        calls = pick(draw, f"bundle {number}", (None, *DRAWN)) or ()
        taken = [pick(draw, f"collective {number}.{index}", TAKEN) for index in range(MOST_IN_A_BUNDLE)]
        names += [call.name for call, is_taken in zip(calls, taken, strict=False) if is_taken]
    return tuple(dict.fromkeys(names)) or ("all_reduce_sum",)


def _pick_numels(draw: DrawFn, world_size: int) -> tuple[int, ...]:
    """Separate draws include or omit each size of the table; if all are omitted, one element."""
    numels = [pick(draw, f"size {index}", (None, *NUMELS)) for index in range(NUM_NUMELS)]
    fitting = [numel for numel in LARGE_NUMELS if world_size**2 * numel <= MOST_DRAWN]
    large = pick(draw, "large size", LARGE)
    if large is not None and fitting:
        numels.append(fitting[large % len(fitting)])
    return tuple(dict.fromkeys(numel for numel in numels if numel is not None)) or (1,)
