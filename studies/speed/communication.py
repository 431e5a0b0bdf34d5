"""What an embedding by rows and by columns sends: documented, recorded, and on a ring in theory.

Letters: w ranks, n elements of the output, b bytes of each.

Of n b bytes a ring moves, per rank, (w - 1) / w in a reduce_scatter and again in an all_gather, hence
twice that in an all_reduce; an all_to_all of a shard moves (w - 1) / w of the shard.

Source: Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms for clusters of workstations
(2009), for the ring.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from equivtest.base.collective import PHASES, Collective
from equivtest.families.embedding.case import STYLES
from equivtest.oracle.collectives import expected_collectives
from equivtest.ranks.pool import Pool
from studies.speed.compared import OUTPUT_LAYOUTS, WORLD_SIZES, embedding_case
from studies.speed.measure import require_answers

FORMULAS = {"all_reduce": "n b", "reduce_scatter": "n b", "all_gather": "n b / w", "all_to_all": "n b / w"}
"""What a rank hands in where every shard is of one size."""


@dataclass(frozen=True)
class Sent:
    """The collectives of one style in one phase, less the scatter of the table, which both have.

    Attributes:
        documented, recorded: Of rank 0, in order.
    """

    output: str
    world_size: int
    style: str
    phase: str
    documented: tuple[Collective, ...]
    recorded: tuple[Collective, ...]

    @property
    def bytes_documented(self) -> float:
        return sum(sent_bytes(call, self.world_size) for call in self.documented)

    @property
    def bytes_recorded(self) -> float:
        return sum(sent_bytes(call, self.world_size) for call in self.recorded)


def measure_communication() -> list[Sent]:
    """Every layout of the output, by each style alone, recorded on gloo."""
    found = []
    with Pool(max_worlds=1) as pool:
        for world_size in WORLD_SIZES:
            for output in OUTPUT_LAYOUTS:
                for style in STYLES:
                    found += _measure(pool, world_size, output, style)
    return found


def _measure(pool: Pool, world_size: int, output: str, style: str) -> list[Sent]:
    case = replace(embedding_case(world_size, output), style=style, records=True)
    replies = pool.run(f"{style}_embedding", case)
    require_answers(style, case, replies)
    recorded = replies[0].answers[0].collectives or ()
    documented, setting = expected_collectives(case, 0), (output, world_size, style)
    return [Sent(*setting, phase, of_phase(documented, phase), of_phase(recorded, phase)) for phase in PHASES]


def of_phase(calls: Sequence[Collective], phase: str) -> tuple[Collective, ...]:
    return tuple(call for call in calls if call.phase == phase and call.kind != "scatter")


def sent_bytes(call: Collective, world_size: int) -> float:
    """What one rank sends in the call, by the shares above."""
    shares = {
        "all_reduce": 2 * (world_size - 1) / world_size,
        "reduce_scatter": (world_size - 1) / world_size,
        "all_gather": world_size - 1,
        "all_to_all": (world_size - 1) / world_size,
    }
    return shares[call.kind] * call.size_bytes
