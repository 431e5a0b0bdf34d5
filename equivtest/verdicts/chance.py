"""Defines the claim on chance: dropout drops a likely number of elements, and different elements in different shards.

If a subject is right, it drops elements independently of one another, both within a shard and across ranks. Then each
count of dropped elements has a binomial distribution. For two shards, the number of pairs of elements that are both
kept or both dropped has a binomial distribution too. A right subject fails on one draw with a probability of at most
limits.FALSE_ALARM, which is divided equally among the counts of the draw.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations

import torch

from equivtest.base import limits
from equivtest.cases.case import Case
from equivtest.layout import replicas
from equivtest.oracle.chance import DELTA, agreement, count_limits
from equivtest.oracle.expected import Expected
from equivtest.ranks.reply import Answers
from equivtest.verdicts.elements import shape_mismatch
from equivtest.verdicts.verdict import Judgement, Mismatch


@dataclass(frozen=True)
class Count:
    """The number of elements for which an event happened, such as being kept.

    Attributes:
        rank: The rank whose elements were counted. For a pair of ranks, this is the second rank.
        count: Number of elements for which the event happened.
        probability: Probability that the event happens for one element.
        pairs: True if elements of two ranks are compared with each other.
    """

    rank: int
    what: str
    num: int
    count: int
    probability: float
    pairs: bool = False

    def limits(self, num_counts: int) -> tuple[int, int]:
        """Returns (low, high), beyond which `count` lies with a probability of at most FALSE_ALARM / num_counts."""
        delta = 2 * DELTA if self.pairs else DELTA  # of p**2 + (1 - p)**2, whose slope is at most 2
        return count_limits(self.num, self.probability, limits.FALSE_ALARM / num_counts, delta=delta)


def judge_chance(case: Case, expected: Expected, answers: Answers) -> Judgement | None:
    """Judges the counts of dropped elements. Returns None if the case draws nothing at random.

    The verdict is inconclusive if the layout or the shape of some rank's tensor is not as expected. A case for which
    `Case.draws_at_random` is true has enough elements that each count can fail.
    """
    wrong, agreeing = [], []
    for name, p in expected.drops.items():
        kept = _kept(case, expected, name, answers)
        counts = list(_counts(kept, 1 - p))
        judged = [(each, *each.limits(len(counts))) for each in counts]
        mismatches = [_describe(name, each, low, high) for each, low, high in judged if not low <= each.count <= high]
        wrong += mismatches
        if kept and not mismatches:
            agreeing.append(name)
    if not expected.drops:
        return None
    kind = "chance" if wrong else "holds" if len(agreeing) == len(expected.drops) else "inconclusive"
    return Judgement(kind, tuple(wrong), tuple(agreeing))


def _kept(case: Case, expected: Expected, name: str, answers: Answers) -> Mapping[int, torch.Tensor]:
    """Maps each rank to a 1-D mask of the elements that dropout kept.

    Leaves out ranks without elements, and all ranks with the same elements except the first. The mapping is empty if
    the tensor breaks its contract, because another claim judges the contract.
    """
    right = expected.tensors[name]
    tensors = {rank: answer.tensors.get(name) for rank, answer in answers.items()}
    if shape_mismatch(name, right, tensors, case.mesh_shape) is not None:
        return {}
    present = {rank: placed for rank, placed in tensors.items() if placed is not None}
    if any(placed.layout != right.layout for placed in present.values()):
        return {}
    firsts = [ranks[0] for ranks in replicas(right.layout, case.mesh_shape)]
    return {rank: present[rank].local.flatten() != 0 for rank in firsts if present[rank].local.numel()}


def _counts(kept: Mapping[int, torch.Tensor], q: float) -> Iterator[Count]:
    """Yields the number of kept elements on each rank, and on all ranks together."""
    for rank, part in kept.items():
        yield Count(rank, "elements of the rank kept", part.numel(), int(part.sum()), q)
    if len(kept) > 1:
        whole = torch.cat(list(kept.values()))
        yield Count(next(iter(kept)), "elements of all ranks kept", whole.numel(), int(whole.sum()), q)
    for (one, left), (other, right) in combinations(kept.items(), 2):
        num = min(left.numel(), right.numel())
        alike = int((left[:num] == right[:num]).sum())
        what = f"elements kept or dropped as on rank {one}"
        yield Count(other, what, num, alike, agreement(q), pairs=True)


def _describe(name: str, count: Count, low: int, high: int) -> Mismatch:
    return Mismatch(
        name,
        count.rank,
        expected=f"{low} to {high} of {count.num} {count.what}",
        actual=f"{count.count} of {count.num}",
        extent=f"by chance about {count.num * count.probability:.1f}",
    )
