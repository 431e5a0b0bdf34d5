"""The claims: a short fixed list, each a function of a case, what is expected and the answers.

(subject, claim) is the conformance key of every record; a name here is never changed without
a line in the changelog.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from equivtest.cases.case import Case
from equivtest.oracle.expected import Expected
from equivtest.ranks.reply import Answers
from equivtest.verdicts.chance import judge_chance
from equivtest.verdicts.communication import judge_collectives
from equivtest.verdicts.exactness import judge_bits, judge_bits_but_for_zeros, judge_repeats
from equivtest.verdicts.structure import judge_parameter_layouts, judge_replicas, judge_touched
from equivtest.verdicts.values import judge_gradients, judge_memory, judge_outputs, judge_training
from equivtest.verdicts.verdict import Judgement


def always(case: Case, draw: int) -> bool:
    """Returns True: the claim speaks of every draw of every case."""
    return True


@dataclass(frozen=True)
class Claim:
    """A claim: its name, what it means, how it is judged, and which draws of which cases it applies to.

    Of others it gives no verdict at all; neither does it where `judge` finds nothing to judge.

    Attributes:
        by_dtype: Whether a conformance run wants verdicts in every dtype; not of what is judged on a fraction of
            visits, nor of refusals.
        flag: The field of the case that has it judged at all, '' where any case will do.
    """

    name: str
    meaning: str
    judge: Callable[[Case, Expected, Answers], Judgement | None]
    applies: Callable[[Case, int], bool] = always
    by_dtype: bool = True
    flag: str = ""


def _judge_refusal(case: Case, expected: Expected, answers: Answers) -> Judgement:
    raise AssertionError("a refusal is judged from the replies' outcomes: see compare")


equals_unsharded = Claim(
    "equals_unsharded",
    "output and parameters equal the oracle's on every rank, the output under its layout",
    judge_outputs,
)
gradients_equal_unsharded = Claim(
    "gradients_equal_unsharded",
    "gradients of inputs and parameters equal the oracle's",
    judge_gradients,
    lambda case, draw: case.leaves_gradients,
)
agrees_on_all_ranks = Claim(
    "agrees_on_all_ranks",
    "what is replicated has the same bits on every rank",
    judge_replicas,
    lambda case, draw: case.world_size > 1,
)
keeps_layout_of_parameter = Claim(
    "keeps_layout_of_parameter",
    "parameters and their gradients live under the parameter's layout",
    judge_parameter_layouts,
    lambda case, draw: case.fixes_layouts,
)
trains_like_unsharded = Claim(
    "trains_like_unsharded",
    "each update, and each step after the first, equals the oracle's, computed from the state that the "
    "ranks really held after the step before",
    judge_training,
    lambda case, draw: case.trains,
)
does_not_touch_its_inputs = Claim(
    "does_not_touch_its_inputs",
    "what the harness handed out has its bits and flags; parameters keep requires_grad",
    judge_touched,
)
drops_at_random = Claim(
    "drops_at_random",
    "as many elements are dropped as chance allows, of all and of each rank's, and on no two ranks the same ones; a "
    "right subject fails it once in 10**12 draws",
    judge_chance,
    lambda case, draw: case.draws_at_random,
    by_dtype=False,
)
uses_only_collectives = Claim(
    "uses_only_collectives",
    "kinds, counts and bytes of the collectives are the documented ones on every rank, padding included; "
    "judged on the visits that record them, one in eight, and on the examples",
    judge_collectives,
    lambda case, draw: case.records,
    by_dtype=False,
    flag="records",
)
uses_only_documented_memory = Claim(
    "uses_only_documented_memory",
    "the bytes that each rank holds, counted by storages, are the documented ones: its partitions, what "
    "is whole, partitions of gradients, what was saved, and nothing else; judged on the visits that "
    "measure them, one in two, and on the examples",
    judge_memory,
    lambda case, draw: any(tensor.role == "memory" for tensor in case.tensors.values()),
    by_dtype=False,
    flag="measures",
)
refuses = Claim(
    "refuses",
    "a case outside the contract raises the same kind of error on every rank; none hangs, and the ranks live on",
    _judge_refusal,
    by_dtype=False,
)
is_exact_without_reduction = Claim(
    "is_exact_without_reduction",
    "where no sum crosses ranks, every bit is that of the unsharded run: signs of zero, NaN and payloads too",
    judge_bits,
    lambda case, draw: case.fixes_bits(draw),
)
is_exact_but_for_added_zeros = Claim(
    "is_exact_but_for_added_zeros",
    "every bit is that of the unsharded run, but that -0.0 may be +0.0 and a NaN any other NaN, where an "
    "all_reduce added zeros, and a subnormal number a zero where the backend declares that; never in what "
    "a rank keeps for itself",
    judge_bits_but_for_zeros,
    lambda case, draw: case.fixes_bits(draw),
)
is_the_identity_for_one_rank = Claim(
    "is_the_identity_for_one_rank",
    "on one rank every bit is that of no parallelism at all; of a linear layer, that of torch's own layer "
    "on exact values, but for the sign of a zero",
    judge_bits,
    lambda case, draw: case.world_size == 1 and not case.values[draw][0].startswith("real"),  # which are rounded
)
repeats_itself = Claim(
    "repeats_itself",
    "draw 0, run once more in the same processes after all other draws, gives the same bits; what is rounded, where "
    "the backend declares that its order of summation varies, a right value; that calls with other "
    "arguments before it did no harm to those draws is judged by the claims about values",
    judge_repeats,
    lambda case, draw: case.repeats and draw == 0,
    by_dtype=False,
    flag="repeats",
)

CLAIMS = {
    claim.name: claim
    for claim in (
        equals_unsharded, gradients_equal_unsharded, agrees_on_all_ranks, keeps_layout_of_parameter,
        trains_like_unsharded, does_not_touch_its_inputs, is_exact_without_reduction, is_exact_but_for_added_zeros,
        is_the_identity_for_one_rank, repeats_itself, drops_at_random, uses_only_collectives,
        uses_only_documented_memory, refuses,
    )
}  # fmt: skip
"""Every claim by name."""
